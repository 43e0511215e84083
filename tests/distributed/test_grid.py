"""The grid and the schedule refuse what would hang or go wrong quietly, and listen on loopback alone."""

import pytest

from megarl.config import Layout
from megarl.host.network import own_address
from tests.distributed.tiny_training import (
    Job,
    disagree,
    dp_rank,
    end_of_the_template,
    forward_only,
    listening,
    make_checkpoint,
    meet_for_weights,
    missing,
    not_finite,
    process_groups,
    share_a_device,
    torch_is_untouched,
)
from tests.rank_pool import Pool, RankError

LOOPBACK = "0100007F"  # 127.0.0.1 in /proc/net/tcp
HOST = own_address("198.51.100.1")  # this machine's, as seen from elsewhere; nothing is sent
ADDRESS = "".join(f"{int(part):02X}" for part in reversed(HOST.split(".")))  # in /proc/net/tcp


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    return Job(make_checkpoint(tmp_path_factory.mktemp("tiny") / "model", num_hidden_layers=2))


def test_every_listening_socket_is_on_loopback(pool: Pool) -> None:
    assert pool.run(listening, Layout(ranks=4, tp=2, pp=2)) == [{LOOPBACK}] * 4


@pytest.mark.parametrize("layout", [Layout(), Layout(ranks=4, tp=2, pp=2, ep=2)], ids=["one", "tp2_pp2_ep2"])
def test_groups_of_the_same_ranks_are_one_and_share_a_thread(pool: Pool, layout: Layout) -> None:
    """Megatron's 18 had 54 threads, a third of which woke up a hundred times a second."""
    for groups, threads in pool.run(process_groups, layout):
        assert len(groups) == len(set(groups)) and tuple(range(layout.ranks)) in groups
        assert threads <= 4 + 2 * len(groups)


@pytest.mark.parametrize("layout", [Layout(ranks=4, tp=2), Layout(ranks=4, cp=2), Layout(ranks=4, pp=2, ep=2), Layout(ranks=4, ep=4)])
def test_the_part_of_a_batch_that_a_rank_works_on_is_known_from_its_number(pool: Pool, layout: Layout) -> None:
    assert pool.run(dp_rank, layout) == [layout.dp_rank(rank) for rank in range(layout.ranks)]


def test_engines_meet_the_trainer_on_the_interface_that_it_listens_on(pool: Pool) -> None:
    assert pool.run(meet_for_weights, Layout(ranks=2), HOST) == [set(), {LOOPBACK, ADDRESS}]


def test_groups_that_share_a_device_listen_where_the_environment_says(pool: Pool) -> None:
    assert pool.run(share_a_device, Layout(), HOST) == [{LOOPBACK, ADDRESS}]


def test_torch_is_untouched_by_the_hook(pool: Pool) -> None:
    assert pool.run(torch_is_untouched, Layout()) == [True]


@pytest.mark.parametrize("layout", [Layout(), Layout(ranks=2, pp=2), Layout(ranks=2, cp=2)], ids=["one", "pp2", "cp2"])
def test_empty_micro_batch_is_run_and_not_visited(pool: Pool, job: Job, layout: Layout) -> None:
    visits = pool.run(forward_only, layout, job)
    assert [len(seen) for seen in visits] == ([2, 2] if layout.cp == 2 else [0, 2] if layout.pp == 2 else [2])
    [one] = pool.run(forward_only, Layout(), job)
    assert sum(map(sum, visits)) == sum(one)


def test_spawned_ranks_as_there_are_on_gpus_do_what_forked_ones_do(pool: Pool, job: Job) -> None:
    spawned = Pool("spawn")
    try:
        assert spawned.run(forward_only, Layout(), job) == pool.run(forward_only, Layout(), job)
    finally:
        spawned.close()


def test_step_with_a_gradient_that_is_not_finite_is_skipped(pool: Pool, job: Job) -> None:
    assert pool.run(not_finite, Layout(ranks=2, tp=2), job) == [(True, True)] * 2


def test_different_numbers_of_micro_batches_are_refused(pool: Pool, job: Job) -> None:
    with pytest.raises(RankError, match="micro-batches differ between ranks: rank 0 brought 1, others from 1 to 2"):
        pool.run(disagree, Layout(ranks=2), job)


def test_rank_that_does_not_come_is_named(pool: Pool) -> None:
    with pytest.raises(RankError, match=r"meet failed on rank 0; ranks that did not arrive: \[1\]"):
        pool.run(missing, Layout(ranks=2))


def test_template_that_dies_is_told_and_replaced(pool: Pool) -> None:
    with pytest.raises(RankError, match=r"the template of the ranks died \(exit code -9\)"):
        pool.run(end_of_the_template, Layout())
    assert pool.run(torch_is_untouched, Layout()) == [True]
