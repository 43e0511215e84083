"""The virtual cluster is what the other tests take it for."""

from tests.slurm.cluster import Cluster
from tests.slurm.virtual import GPUS

SHOW = "echo $(hostname) $(hostname -I) $CUDA_VISIBLE_DEVICES $(ls /tmp /dev/shm | wc -l); touch /tmp/mine /dev/shm/mine"
CLEAN = "rm /tmp/mine /dev/shm/mine; tr '\\0' '\\n' </proc/1/cmdline | grep -A 1 '^node$' | tail -1"


def test_each_node_has_a_name_an_address_gpus_files_and_processes_of_its_own(slurm: Cluster) -> None:
    step = ("srun", "-N3", "--ntasks-per-node=1", f"--gpus-per-node={GPUS}", "bash", "-c")
    first, second = (sorted(slurm.say(*step, SHOW).splitlines()) for _ in range(2))
    gpus = ",".join(map(str, range(GPUS)))
    assert [line.split()[:3] for line in first] == [[f"n{n}", f"10.77.0.{10 + n}", gpus] for n in (1, 2, 3)]
    assert [int(b.split()[3]) - int(a.split()[3]) for a, b in zip(first, second, strict=True)] == [2, 2, 2], "its own two files, no other's"
    assert any("/tmp/mine" in found for found in slurm.leftovers("n2"))
    assert sorted(slurm.say(*step, CLEAN).split()) == ["n1", "n2", "n3"], "the first process of each is its own"
    slurm.wait_until_clean()
    assert slurm.run("sbatch", "--test-only", "-p", "many", "-N64", "--gpus-per-node=8", "--wrap=true").returncode == 0
    assert slurm.run("sbatch", "--test-only", "-p", "many", "-N65", "--gpus-per-node=8", "--wrap=true").returncode != 0
