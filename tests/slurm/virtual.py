"""A real Slurm on this machine: munged, slurmctld, and for each node a slurmd with an address, a hostname, /tmp, /dev/shm and processes of
its own. Run as `unshare SPACES python virtual.py DIRECTORY NODES KEPT...`, as `tests.slurm.cluster` does: what it has started ends with it.

Each node says that it has two CPUs and eight GPUs, which are /dev/null. The partition `many` has 64 nodes that nobody has switched on.
"""

import ctypes
import os
import subprocess
import sys
import time
from pathlib import Path

SPACES = ("--net", "--mount", "--uts", "--ipc", "--pid", "--fork", "--kill-child", "--mount-proc")
CPUS, GPUS, MANY = 2, 8, 64
NEW_MOUNTS_AND_NAMES = 0x00020000 | 0x04000000  # CLONE_NEWNS | CLONE_NEWUTS
LIMIT_S = 60.0

# Slurm warns a job that is preempted by its own --signal, as here, or by SIGTERM to its steps.
USER_SIGNAL = "SlurmctldParameters=preempt_send_user_signal"

CONF = """
ClusterName=virtual
SlurmctldHost=control(10.77.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={d}/munge/sock,cred_expire=5
StateSaveLocation={d}/state
SlurmdSpoolDir={d}/spool/%n
SlurmctldPidFile={d}/run/slurmctld.pid
SlurmdPidFile={d}/run/slurmd.%n.pid
SlurmctldDebug=debug
SlurmctldLogFile={d}/log/slurmctld.log
SlurmdLogFile={d}/log/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,sched_min_interval=0,bf_interval=1,sched_interval=1
ReturnToService=2
SlurmctldTimeout=10
SlurmdTimeout=10
MessageTimeout=5
KillWait=30
WaitTime=2
MinJobAge=3600
JobRequeue=1
SlurmdParameters=config_overrides
PropagateResourceLimits=NONE
GresTypes=gpu
{preemption}
PreemptMode=REQUEUE
PreemptType=preempt/partition_prio
NodeName=n[1-{nodes}] NodeAddr=10.77.0.[11-{last}] CPUs={cpus} RealMemory=2000 Gres=gpu:h100:{gpus} State=UNKNOWN
NodeName=m[1-{many}] NodeAddr=10.78.0.[1-{many}] CPUs=96 RealMemory=2000 Gres=gpu:h100:{gpus} State=CLOUD
PartitionName=main Nodes=n[1-{nodes}] Default=YES MaxTime=INFINITE State=UP PriorityTier=1 GraceTime=60
PartitionName=high Nodes=n[1-{nodes}] MaxTime=INFINITE State=UP PriorityTier=10
PartitionName=many Nodes=m[1-{many}] MaxTime=1-00:00:00 State=UP
PartitionName=short Nodes=n[1-{nodes}] DefaultTime=5 MaxTime=30 MaxNodes=2 State=UP
PartitionName=shut Nodes=n[1-{nodes}] State=DOWN
PartitionName=paid Nodes=n[1-{nodes}] AllowAccounts=prod AllowQos=long State=UP
SuspendProgram=/bin/true
ResumeProgram=/bin/true
"""

# $0 "node", $1 its name, $2 its address, $3 the directory, then what stays visible of /tmp
NODE = r"""
set -e
name=$1 address=$2 directory=$3; shift 3
hostname "$name"
mount -t tmpfs -o size=2g tmpfs /dev/shm
mount -t tmpfs tmpfs /mnt
for place; do mkdir -p "/mnt$place"; mount --bind "$place" "/mnt$place"; done
mount -t tmpfs -o mode=1777 tmpfs /tmp
for place; do mkdir -p "$place"; mount --move "/mnt$place" "$place"; done
umount /mnt
ip link set lo up
until ip link show eth0 &>/dev/null; do sleep .02; done
ip addr add "$address/24" dev eth0
ip link set eth0 up
while :; do  # as systemd starts it again
    while [[ -e $directory/run/$name.down ]]; do sleep .1; done
    SLURM_CONF=$directory/slurm.conf /usr/sbin/slurmd -D -N "$name" || true
done
"""


def write(d: Path, nodes: int) -> None:
    """The files of the daemons."""
    for name in ("munge", "state", "run", "log", "dev", *(f"spool/n{n}" for n in range(1, nodes + 1))):
        (d / name).mkdir(parents=True)
    (d / "munge").chmod(0o755)
    (d / "munge/key").write_bytes(os.urandom(1024))
    (d / "munge/key").chmod(0o600)
    for gpu in range(GPUS):
        (d / f"dev/nvidia{gpu}").symlink_to("/dev/null")  # slurmd takes no plain file for a device
    names = "".join(f"10.77.0.{10 + n} n{n}\n" for n in range(1, nodes + 1)) + "".join(f"10.78.0.{n} m{n}\n" for n in range(1, MANY + 1))
    (d / "hosts").write_text(f"127.0.0.1 localhost\n10.77.0.1 control\n{names}")
    (d / "slurm.conf").write_text(CONF.format(d=d, nodes=nodes, last=10 + nodes, cpus=CPUS, gpus=GPUS, many=MANY, preemption=USER_SIGNAL))
    gres = f"Name=gpu Type=h100 File={d}/dev/nvidia[0-{GPUS - 1}]"
    (d / "gres.conf").write_text(f"AutoDetect=off\nNodeName=n[1-{nodes}] {gres}\nNodeName=m[1-{MANY}] {gres}\n")


def start(d: Path, name: str, *command: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=(d / f"log/{name}.out").open("wb"), stderr=subprocess.STDOUT)


def call(*command: str) -> None:
    subprocess.run(command, check=True)


def main(d: Path, nodes: int, kept: list[str]) -> None:
    begun = time.monotonic()

    def late() -> bool:
        if time.monotonic() - begun > LIMIT_S:
            sys.exit(f"no Slurm within {LIMIT_S:g} s: see {d}/log")
        time.sleep(0.02)
        return True

    assert os.getpid() == 1, "in process, mount and network spaces of its own"
    assert ctypes.CDLL(None).unshare(NEW_MOUNTS_AND_NAMES) == 0
    write(d, nodes)
    call("mount", "--make-rprivate", "/")
    call("mount", "--bind", str(d / "hosts"), "/etc/hosts")
    call("hostname", "control")
    for line in ("set lo up", "add br0 type bridge", "set br0 up"):
        call("ip", "link", *line.split())
    call("ip", "addr", "add", "10.77.0.1/24", "dev", "br0")
    os.environ["SLURM_CONF"] = str(d / "slurm.conf")
    munge = [
        f"--{name}={d}/munge/{file}" for name, file in (("socket", "sock"), ("pid-file", "pid"), ("log-file", "log"), ("seed-file", "seed"))
    ]
    # --force: it takes no key below directories that only their owner may enter, as pytest's
    start(d, "munged", "/usr/sbin/munged", "-F", "--force", f"--key-file={d}/munge/key", "--num-threads=2", *munge)
    while not (d / "munge/sock").exists() and late():
        pass
    start(d, "slurmctld", "/usr/sbin/slurmctld", "-D", "-i")
    for n in range(1, nodes + 1):
        process = start(d, f"n{n}", "unshare", *SPACES, "bash", "-c", NODE, "node", f"n{n}", f"10.77.0.{10 + n}", str(d), *kept)
        while os.readlink(f"/proc/{process.pid}/ns/net") == os.readlink("/proc/self/ns/net") and late():
            pass
        call("ip", *f"link add v{n} type veth peer name eth0 netns {process.pid}".split())
        call("ip", *f"link set v{n} master br0".split())
        call("ip", *f"link set v{n} up".split())
    idle = ("sinfo", "-h", "-p", "main", "-t", "idle", "-o", "%D")
    while subprocess.run(idle, capture_output=True, text=True).stdout.strip() != str(nodes) and late():
        pass
    # A slurmd that reports its jobs just as it starts one deletes that one's script (_handle_stray_script, Slurm 22.05). It is asked for
    # them about SlurmdTimeout / 3 after slurmctld's start, which was in the middle of the first jobs, and then only every 20th time.
    while "Spawning registration agent" not in (d / "log/slurmctld.log").read_text() and late():
        pass
    print("ready", flush=True)
    sys.stdin.buffer.read()  # until whoever started this ends


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
