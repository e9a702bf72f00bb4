"""What holds for every registered method on a network with BatchNorm, under every policy for its running statistics."""

import re
from typing import Any

import pytest
import torch

from pflsec.core import registry
from pflsec.core.buffers import LocalBuffers
from pflsec.core.network import buffer_in
from pflsec.training.local import Training, Unrolled
from tests import toys
from tests.contracts import test_every_method as every
from tests.contracts.cases import Case, every_case_with_batchnorm, every_method, exchange

CASES = every_case_with_batchnorm()
for_every_case = pytest.mark.parametrize("case", CASES, ids=str)
for_every_sending_case = pytest.mark.parametrize(
    "case", [c for c in CASES if registry.load("algorithms", c.key).up], ids=str
)
for_every_local_case = pytest.mark.parametrize("case", [c for c in CASES if c.buffers == "local"], ids=str)
for_both_interpreters = pytest.mark.parametrize("driver", [Training, Unrolled])


# --- pure functions of plain tensors, as without BatchNorm


@for_every_case
@for_both_interpreters
def test_local_work_is_a_pure_function(case: Case, driver: Any):
    every.test_local_work_repeats_itself_bit_for_bit(case, 2, driver)
    every.test_local_work_leaves_its_inputs_alone(case, driver)


@for_every_case
def test_the_server_and_the_observer_leave_their_inputs_alone(case: Case):
    every.test_the_server_and_the_observer_leave_their_inputs_alone(case)


@for_every_case
def test_items_have_a_newcomers_form_and_survive_a_file(case: Case, tmp_path: Any):
    every.test_items_are_plain_tensors_and_survive_a_file(case, tmp_path)
    every.test_a_state_has_the_names_and_shapes_of_a_newcomers(case)


@for_every_case
@pytest.mark.parametrize("after", [0, 2])
def test_messages_keep_the_contract(case: Case, after: int):
    every.test_messages_keep_the_contract(case, after, "down")
    every.test_messages_keep_the_contract(case, after, "up")


# --- two interpreters, and replays


@for_every_case
def test_both_interpreters_send_and_keep_the_same(case: Case):
    every.test_both_interpreters_send_and_keep_the_same(case)


@for_every_sending_case
def test_an_unrolled_upload_is_differentiable(case: Case):
    every.test_an_unrolled_upload_is_differentiable_in_the_data(case)
    every.test_an_unrolled_upload_is_differentiable_in_the_state(case)
    every.test_labels_may_be_probabilities(case)


@for_every_case
@pytest.mark.parametrize("batch", [(4, 1), (4, 3), (1, 1)], ids=["one step", "three steps", "one image"])
@pytest.mark.parametrize("after", [0, 2])
def test_the_replay_of_the_truth_gives_the_upload(case: Case, batch: tuple[int, int], after: int):
    every.test_the_replay_of_the_truth_gives_the_upload(case, batch, torch.float64, 1e-11, after)


@for_every_sending_case
@pytest.mark.parametrize("history", [True, False])
def test_the_target_of_a_capture_is_what_its_replay_gives_at_the_truth(case: Case, history: bool):
    every.test_the_target_of_a_capture_is_what_its_replay_gives_at_the_truth(case, history)


@for_every_case
def test_what_the_log_reveals_is_the_clients_state(case: Case):
    every.test_what_the_log_reveals_is_the_clients_state(case, after=2)


@for_every_case
def test_the_aggregate_does_not_depend_on_the_order_of_clients(case: Case):
    every.test_the_aggregate_does_not_depend_on_the_order_of_clients(case)


# --- the policies


@for_every_case
def test_running_statistics_follow_the_data_of_the_model_that_is_tested(case: Case):
    """After two rounds no statistic is where it began, for any client that is tested with it; frozen ones are no items."""
    ex = exchange(case)
    tested = ex.setup.algorithm.deploy(ex.state, ex.down)
    net = ex.setup.net
    assert net.buffers == (set() if case.buffers == "frozen" else toys.normed().buffers)
    for name in net.buffers:
        assert not (tested[name] == float(name.endswith("var"))).any()
        assert tested[name].isfinite().all()
        assert not name.endswith("var") or (tested[name] > 0).all()


@for_every_local_case
def test_local_statistics_are_on_no_message(case: Case):
    ex = exchange(case)
    assert isinstance(ex.setup.algorithm, LocalBuffers)
    sent = ex.setup.algorithm.local(ex.context(), ex.state, ex.down).up
    for items in (ex.down, sent, every.exchange(case, after=0).down):
        assert not [name for name in items if buffer_in(ex.setup.net, name)]
    assert ex.setup.algorithm.global_model(ex.server) is None
    found = ex.setup.algorithm.reconstruct_state(ex.memory) or {}
    assert not [name for name in found if buffer_in(ex.setup.net, name)]


@for_every_local_case
def test_local_statistics_do_not_hang_on_those_of_other_clients(case: Case):
    """Two clients with other data have other statistics, though they were sent the same model."""
    ex = exchange(case)
    algorithm, other = ex.setup.algorithm, toys.context(ex.setup, ex.t, 1)
    a = algorithm.local(ex.context(), ex.state, ex.down).state
    b = algorithm.local(other, ex.state, ex.down).state
    assert [k for k in a if buffer_in(ex.setup.net, k)]
    assert not any(torch.equal(a[k], b[k]) for k in a if buffer_in(ex.setup.net, k))


@pytest.mark.parametrize("key", every_method())
def test_every_method_says_what_it_makes_of_running_statistics(key: str):
    """ "yes", or why they must stay local or be frozen."""
    said = registry.load("algorithms", key).batchnorm
    assert re.fullmatch(r"yes|(local|no): \S.*[^.]", said)
