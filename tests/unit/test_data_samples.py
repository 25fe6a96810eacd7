"""Samples, their order and their way to the ranks: functions of seed and index, never of the layout."""

import subprocess
import sys

import numpy as np
import pytest
import torch

from automodel.config import ConfigError
from automodel.data import IGNORED_LABEL, EpochSampler, TokenDataset, TrainLoader, stable_seed, validation_batches
from automodel.data.dataset import join_documents
from automodel.data.seeds import random_permutation

SEQ_LENGTH = 8
DP_SIZES = (1, 2, 4, 8)
SEED_OF_FIRST_EPOCH = 2507009918915187275
FIRST_EPOCH_OF_EIGHT = [2, 0, 7, 3, 5, 6, 4, 1]


def dataset(samples: int, mask_labels: float = 0.0, seed: int = 3) -> TokenDataset:
    tokens = np.arange(samples * SEQ_LENGTH + 1, dtype=np.int32) + 1000
    return TokenDataset(tokens, SEQ_LENGTH, mask_labels, seed)


def loaders(data: TokenDataset, dp_size: int, global_batch: int = 16, local_batch: int = 2) -> list[TrainLoader]:
    return [
        TrainLoader(data, EpochSampler(len(data), seed=3), global_batch, local_batch, rank, dp_size)
        for rank in range(dp_size)
    ]


def micro_batch_facts(micro_batches) -> list[tuple]:
    """Everything that training reads of the micro-batches that hold samples, in an order of their own."""
    return sorted(
        (batch.sample_ids, batch.input_ids.tolist(), batch.labels.tolist(), batch.num_label_tokens, batch.seed)
        for batch in micro_batches
        if batch.sample_ids
    )


def test_labels_are_the_next_tokens_and_every_token_but_the_first_is_a_label_once():
    data = dataset(5)
    labels = []
    for index in range(len(data)):
        sample = data[index]
        assert sample["input_ids"].dtype == sample["labels"].dtype == np.int64
        assert sample["input_ids"].shape == sample["labels"].shape == (SEQ_LENGTH,)
        assert sample["labels"][:-1].tolist() == sample["input_ids"][1:].tolist()
        labels.extend(sample["labels"].tolist())
    assert labels == data.tokens[1:].tolist()


@pytest.mark.parametrize(("tokens", "samples"), [(8, 0), (9, 1), (16, 1), (17, 2)])
def test_a_sample_needs_one_token_more_than_its_length(tokens, samples):
    assert len(TokenDataset(np.zeros(tokens, dtype=np.uint16), SEQ_LENGTH)) == samples


def test_index_outside_is_an_error():
    with pytest.raises(IndexError):
        dataset(3)[3]
    with pytest.raises(IndexError):
        dataset(3)[-1]


def test_each_document_is_closed_by_eos():
    joined = join_documents([np.array([1, 2]), np.array([3])], 9, np.uint16)
    assert joined.tolist() == [1, 2, 9, 3, 9]


def test_masks_are_a_function_of_seed_and_index_alone():
    data = dataset(50, mask_labels=1 / 3)
    backwards = [data[index]["labels"] for index in reversed(range(50))]
    forwards = [data[index]["labels"] for index in range(50)]
    assert np.array_equal(forwards, backwards[::-1])
    # A longer corpus leaves a sample's mask as it was; another seed does not.
    assert np.array_equal(forwards, [dataset(90, mask_labels=1 / 3)[index]["labels"] for index in range(50)])
    assert not np.array_equal(
        forwards, [dataset(50, mask_labels=1 / 3, seed=4)[index]["labels"] for index in range(50)]
    )
    share = np.mean(np.array(forwards) == IGNORED_LABEL)
    assert 0.2 < share < 0.45
    assert len({tuple(row == IGNORED_LABEL) for row in forwards}) > 30


def test_all_or_no_labels_can_be_masked():
    assert (dataset(4, mask_labels=1.0)[2]["labels"] == IGNORED_LABEL).all()
    assert (dataset(4)[2]["labels"] != IGNORED_LABEL).all()


def test_random_functions_are_the_same_in_every_process():
    code = "from automodel.data.seeds import *; print(stable_seed('a', 1), *random_permutation(6, 'b', 2))"
    results = {
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60).stdout
        for _ in range(2)
    }
    here = " ".join(str(number) for number in [stable_seed("a", 1), *random_permutation(6, "b", 2)])
    assert results == {here + "\n"}
    # The value itself is fixed: a checkpoint of last year must resume in the same order.
    assert stable_seed("sample order", 0, 0) == SEED_OF_FIRST_EPOCH
    assert random_permutation(8, "sample order", 0, 0).tolist() == FIRST_EPOCH_OF_EIGHT


def test_seed_parts_do_not_run_together():
    assert (
        len({stable_seed("a", 11, 1), stable_seed("a", 1, 11), stable_seed("a", "11", 1), stable_seed("a11", 1)}) == 4
    )
    assert 0 <= stable_seed("a", -5) < 2**63


def test_an_epoch_has_every_sample_once_and_epochs_differ():
    sampler = EpochSampler(37, seed=0)
    epochs: list[list[int]] = [[], [], []]
    while sampler.epoch < 3:
        batch = sampler.next_global_batch(10)
        epochs[batch.epoch].extend(batch.indices.tolist())
    assert all(sorted(order) == list(range(37)) for order in epochs)
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]
    assert EpochSampler(37, seed=1).next_global_batch(37).indices.tolist() != epochs[0]


def test_order_does_not_depend_on_the_batch_size():
    small, large = EpochSampler(37, seed=0), EpochSampler(37, seed=0)
    order = np.concatenate([small.next_global_batch(5).indices for _ in range(8)])
    assert order.tolist() == large.next_global_batch(37).indices.tolist()


def test_last_batch_of_an_epoch_is_shorter_and_spans_no_two_epochs():
    sampler = EpochSampler(25, seed=0)
    sizes = [(batch.epoch, len(batch.indices)) for batch in (sampler.next_global_batch(10) for _ in range(6))]
    assert sizes == [(0, 10), (0, 10), (0, 5), (1, 10), (1, 10), (1, 5)]


@pytest.mark.parametrize("samples", [64, 53, 3])
def test_micro_batches_of_a_step_are_the_same_for_every_number_of_ranks(samples):
    data = dataset(samples, mask_labels=1 / 3)
    reference = loaders(data, 1)[0]
    expected = [reference.next_step() for _ in range(10)]
    assert {step.epoch for step in expected} >= {0, 1}
    for dp_size in DP_SIZES:
        ranks = loaders(data, dp_size)
        for want in expected:
            steps = [rank.next_step() for rank in ranks]
            together = [batch for step in steps for batch in step.micro_batches]
            assert micro_batch_facts(together) == micro_batch_facts(want.micro_batches)
            assert {step.epoch for step in steps} == {want.epoch}
            assert sorted(sample for step in steps for sample in step.sample_ids) == sorted(want.sample_ids)
            assert sum(step.num_label_tokens for step in steps) == want.num_label_tokens


@pytest.mark.parametrize("dp_size", DP_SIZES)
@pytest.mark.parametrize("samples", [64, 53, 17, 3])
def test_every_rank_has_as_many_micro_batches_of_one_shape(dp_size, samples):
    ranks = loaders(dataset(samples), dp_size)
    for _ in range(ranks[0].steps_per_epoch):
        steps = [rank.next_step() for rank in ranks]
        assert len({len(step.micro_batches) for step in steps}) == 1
        for batch in (batch for step in steps for batch in step.micro_batches):
            assert batch.input_ids.shape == batch.labels.shape == (2, SEQ_LENGTH)
            assert batch.input_ids.dtype == batch.labels.dtype == torch.int64
    assert steps[0].epoch == 0
    assert ranks[0].next_step().epoch == 1


def test_missing_rows_are_padding_that_trains_nothing():
    ranks = loaders(dataset(19), dp_size=4)
    for rank in ranks:
        rank.next_step()
    last = [rank.next_step() for rank in ranks]
    assert [step.sample_ids == [] for step in last] == [False, False, True, True]
    assert [len(step.sample_ids) for step in last] == [2, 1, 0, 0]
    for step in last:
        (batch,) = step.micro_batches
        padding = batch.labels[len(batch.sample_ids) :]
        assert (padding == IGNORED_LABEL).all()
        assert (batch.input_ids[len(batch.sample_ids) :] == 0).all()
        assert (
            batch.num_label_tokens == int((batch.labels != IGNORED_LABEL).sum()) == SEQ_LENGTH * len(batch.sample_ids)
        )


def test_dropout_seeds_differ_between_micro_batches_epochs_and_runs():
    data = dataset(16)
    loader = loaders(data, 1)[0]
    seeds = [batch.seed for _ in range(3) for batch in loader.next_step().micro_batches]
    other = TrainLoader(data, EpochSampler(16, seed=4), 16, 2, 0, 1)
    seeds += [batch.seed for batch in other.next_step().micro_batches]
    assert len(set(seeds)) == len(seeds)


def test_resume_in_the_middle_of_the_second_epoch_goes_on_under_another_layout():
    data = dataset(53)
    run = loaders(data, 2)
    for _ in range(6):
        states = [rank.next_step() and rank.state_dict() for rank in run]
    assert states[0] == states[1] == {"epoch": 1, "position": 32, "num_samples": 53}
    expected = [[rank.next_step() for rank in run] for _ in range(7)]
    for dp_size in DP_SIZES:
        resumed = loaders(data, dp_size)
        for rank in resumed:
            rank.load_state_dict(states[0])
        for want in expected:
            together = [batch for rank in resumed for batch in rank.next_step().micro_batches]
            assert micro_batch_facts(together) == micro_batch_facts([b for step in want for b in step.micro_batches])


def test_state_at_the_end_of_an_epoch_resumes_with_the_next():
    sampler = EpochSampler(10, seed=0)
    sampler.next_global_batch(10)
    resumed = EpochSampler(10, seed=0)
    resumed.load_state_dict(sampler.state_dict())
    batch = resumed.next_global_batch(4)
    assert (batch.epoch, batch.position) == (1, 0)
    assert batch.indices.tolist() == sampler.next_global_batch(4).indices.tolist()


def test_resume_over_other_data_is_refused():
    with pytest.raises(ConfigError, match="saved over 10 samples"):
        EpochSampler(11, seed=0).load_state_dict(EpochSampler(10, seed=0).state_dict())


@pytest.mark.parametrize(("samples", "steps"), [(64, 4), (65, 5), (3, 1)])
def test_steps_per_epoch_count_the_short_last_one(samples, steps):
    assert loaders(dataset(samples), 1)[0].steps_per_epoch == steps


@pytest.mark.parametrize("samples", [16, 13, 1])
def test_validation_sees_each_sample_once_with_equal_counts_on_all_ranks(samples):
    data = dataset(samples, mask_labels=1 / 3)
    expected = micro_batch_facts(validation_batches(data, 2, 0, 1))
    for dp_size in DP_SIZES:
        ranks = [list(validation_batches(data, 2, rank, dp_size)) for rank in range(dp_size)]
        assert len({len(batches) for batches in ranks}) == 1
        assert micro_batch_facts([batch for batches in ranks for batch in batches]) == expected
        assert sorted(sample for batches in ranks for batch in batches for sample in batch.sample_ids) == list(
            range(samples)
        )


def test_validation_subset_is_chosen_by_the_seed_and_keeps_its_samples():
    data = dataset(100, mask_labels=1 / 3)
    subset = data.subset(20)
    again = dataset(100, mask_labels=1 / 3).subset(20)
    assert subset.indices.tolist() == again.indices.tolist() == sorted(set(subset.indices.tolist()))
    assert len(subset) == 20
    assert subset.indices.tolist() != dataset(100, seed=4).subset(20).indices.tolist()
    for position in range(20):
        whole = data[subset.sample_id(position)]
        assert all(np.array_equal(subset[position][key], whole[key]) for key in whole)
    ids = [sample for rank in range(4) for b in validation_batches(subset, 2, rank, 4) for sample in b.sample_ids]
    assert sorted(ids) == subset.indices.tolist()


def test_no_limit_or_a_larger_one_takes_all():
    data = dataset(10)
    assert len(data.subset(None)) == len(data.subset(10)) == len(data.subset(11)) == 10


def test_fingerprint_tells_data_apart():
    same = dataset(10).fingerprint
    assert same == dataset(10).fingerprint
    changed = dataset(10)
    changed.tokens[3] += 1
    assert len({same, changed.fingerprint, dataset(11).fingerprint, dataset(10, mask_labels=0.5).fingerprint}) == 4
