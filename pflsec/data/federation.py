"""A federation: one dataset, divided among clients, each with rows to train on and rows to test on."""

import functools
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from pflsec.core.errors import DataError
from pflsec.core.inputs import PAD, InputSpec
from pflsec.core.streams import numpy_stream
from pflsec.data.datasets import Dataset
from pflsec.data.partitions import PFLLIB, PFLLIB_TEST, assign, pfllib_compat, split

BLOCK = 2000
FLAT = 1e-6


@dataclass(frozen=True, eq=False)
class Shard:
    """One client's rows of the dataset: sorted int64 row numbers to train on, and others to test on."""

    train: np.ndarray
    test: np.ndarray


@dataclass(frozen=True, eq=False)
class Federation:
    """A dataset and its division. Only row numbers are held; tensors are made when asked for.

    dataset       the images and labels
    shards        one per client; no row is in two shards, or on both sides of one
    input         shape, classes and normalisation; mean and std are those of all training rows
    global_test   sorted row numbers for testing a common network: the given test rows where they are kept
                  apart, otherwise all clients' test rows together
    """

    dataset: Dataset
    shards: tuple[Shard, ...]
    input: InputSpec
    global_test: np.ndarray

    @property
    def clients(self) -> int:
        """The number of clients."""
        return len(self.shards)

    def train(self, client: int) -> tuple[Tensor, Tensor]:
        """Return a client's training rows, copied: x float32 [n, C, H, W], normalised, and y int64 [n].

        Of texts x is the tokens, int64 [n, T].
        """
        return self._tensors(self._shard(client).train)

    def test(self, client: int) -> tuple[Tensor, Tensor]:
        """Return a client's own test rows, in the same form as `train`."""
        return self._tensors(self._shard(client).test)

    def global_test_set(self) -> tuple[Tensor, Tensor]:
        """Return the rows of `global_test`, in the same form as `train`."""
        return self._tensors(self.global_test)

    def sizes(self) -> list[int]:
        """Return the number of training rows of each client."""
        return [len(shard.train) for shard in self.shards]

    @functools.cached_property
    def clients_share_global_test(self) -> bool:
        """Whether the global test rows are the clients' test rows, each once."""
        return np.array_equal(np.sort(np.concatenate([shard.test for shard in self.shards])), self.global_test)

    def histogram(self) -> dict[str, Any]:
        """Return who holds what, as lists of counts.

        class_names     [classes]
        train, test     each {"counts": [clients][classes], "per_client": [clients], "per_class": [classes],
                        "total": n}
        global_test     {"per_class": [classes], "total": n}
        """
        common = self._counts(self.global_test)
        return {
            "class_names": list(self.dataset.class_names),
            "train": _table(np.stack([self._counts(shard.train) for shard in self.shards])),
            "test": _table(np.stack([self._counts(shard.test) for shard in self.shards])),
            "global_test": {"per_class": common.tolist(), "total": int(common.sum())},
        }

    def fingerprint(self) -> str:
        """Return the SHA-256, in hexadecimal, of all clients' row numbers and of the global test set's."""
        digest = hashlib.sha256()
        for rows in (
            *(side for shard in self.shards for side in (shard.train, shard.test)),
            self.global_test,
        ):
            digest.update(len(rows).to_bytes(8, "little"))
            digest.update(rows.astype("<i8").tobytes())
        return digest.hexdigest()

    def pool(self, limit: int = 1000, include: Sequence[int] = ()) -> np.ndarray:
        """Return sorted dataset rows, training rows only, among which a reconstruction is to be identified.

        All of `include` (the victims) is in it, filled up to `limit` rows by a sample that depends on the
        partition alone. Raises DataError when a row to include is nobody's training row.
        """
        rows = self._training_rows()
        wanted = np.unique(np.asarray(include, dtype=np.int64))
        strange = np.setdiff1d(wanted, rows)
        if strange.size:
            raise DataError(f"row {strange[0]} cannot be in the pool: it is not a training row of any client.")
        order = numpy_stream("pool", self.fingerprint()).permutation(rows)
        others = order[~np.isin(order, wanted)][: max(limit - len(wanted), 0)]
        return np.sort(np.concatenate([wanted, others]))

    def mean_image(self) -> Tensor:
        """Return the best guess that needs no message: the mean of all training images, float32 [C, H, W], pixels in [0, 1].

        Of texts: the tokens of which a training text is expected to hold most, int64 [T], as many as it has on average, padded.
        """
        rows = self._training_rows()
        if self.dataset.words is not None:
            return torch.from_numpy(_usual_tokens(self.dataset.images[rows], len(self.dataset.words)))
        total = torch.stack([block.sum(0) for block in _blocks(self.dataset, rows)]).sum(0)
        return (total / len(rows)).float()

    def _training_rows(self) -> np.ndarray:
        return np.sort(np.concatenate([shard.train for shard in self.shards]))

    def _shard(self, client: int) -> Shard:
        if not 0 <= client < self.clients:
            raise DataError(f"there is no client {client}: the {self.clients} clients are numbered from 0.")
        return self.shards[client]

    def _tensors(self, rows: np.ndarray) -> tuple[Tensor, Tensor]:
        return self.input.normalise(self.dataset.pixels(rows)), torch.from_numpy(self.dataset.labels[rows])

    def _counts(self, rows: np.ndarray) -> np.ndarray:
        return np.bincount(self.dataset.labels[rows], minlength=self.dataset.classes)


def _table(counts: np.ndarray) -> dict[str, Any]:
    return {
        "counts": counts.tolist(),
        "per_client": counts.sum(1).tolist(),
        "per_class": counts.sum(0).tolist(),
        "total": int(counts.sum()),
    }


def _blocks(dataset: Dataset, rows: np.ndarray) -> Iterator[Tensor]:
    """Yield the images of these rows, float64 in [0, 1], a block at a time to spare memory."""
    for start in range(0, len(rows), BLOCK):
        yield dataset.pixels(rows[start : start + BLOCK]).double()


def _input_spec(dataset: Dataset, shards: Sequence[Shard]) -> InputSpec:
    if dataset.words is not None:
        return InputSpec(dataset.images.shape[1:], dataset.classes, (), (), len(dataset.words))
    channels, height, width = (int(n) for n in dataset.images.shape[1:])
    rows = np.concatenate([shard.train for shard in shards])
    total, squares = np.zeros(channels), np.zeros(channels)
    for block in _blocks(dataset, rows):
        total += block.sum((0, 2, 3)).numpy()
        squares += block.square().sum((0, 2, 3)).numpy()
    mean = total / (len(rows) * height * width)
    std = np.sqrt(np.maximum(squares / (len(rows) * height * width) - mean**2, 0))
    std[std < FLAT] = 1.0
    return InputSpec((channels, height, width), dataset.classes, tuple(mean.tolist()), tuple(std.tolist()))


def _usual_tokens(tokens: np.ndarray, words: int) -> np.ndarray:
    """Return the multiset, [T] padded, with the largest expected overlap with a text of tokens [n, T], of their mean length.

    A word's k-th copy adds to the overlap in every text that has k of it, so the copies that most texts have are taken.
    """
    size, places = round(float((tokens != PAD).sum(1).mean())), tokens.shape[1]
    having = np.zeros((words, places), dtype=np.int64)
    for text in tokens:
        for word, count in zip(*np.unique(text[text != PAD], return_counts=True), strict=True):
            having[word, :count] += 1
    best = np.argsort(-having.flatten(), kind="stable")[:size]
    usual = np.full(places, PAD, dtype=np.int64)
    usual[: len(best)] = np.sort(best // places)
    return usual


def _copies(images: np.ndarray) -> np.ndarray:
    """Return one number per image, int64 [n]; images with the same bytes have the same number."""
    numbers: dict[bytes, int] = {}
    digests = (hashlib.blake2b(image.tobytes(), digest_size=16).digest() for image in images)
    return np.array([numbers.setdefault(digest, len(numbers)) for digest in digests], dtype=np.int64)


def _deal(
    dataset: Dataset, rows: np.ndarray, partition: str, seed: int, options: Mapping[str, Any]
) -> list[np.ndarray]:
    """Return each client's part of these rows of the dataset."""
    ids = None if dataset.client_ids is None else dataset.client_ids[rows]
    rng = numpy_stream(seed, "partition", partition)
    return [rows[part] for part in assign(partition, rng, labels=dataset.labels[rows], ids=ids, **options)]


def _split_share(dataset: Dataset, rows: np.ndarray, fraction: float, seed: int, client: int) -> Shard:
    groups = _copies(dataset.images[rows])
    train, test = split(dataset.labels[rows], groups, fraction, numpy_stream(seed, "split", client))
    return Shard(rows[train], rows[test])


def _given_share(dataset: Dataset, is_test: np.ndarray, rows: np.ndarray) -> Shard:
    """Return a natural client's shard by the given flags; DataError naming the client if a side is empty."""
    shard = Shard(rows[~is_test[rows]], rows[is_test[rows]])
    for side, held in (("test", shard.test), ("training", shard.train)):
        if not len(held):
            who = None if dataset.client_ids is None else dataset.client_ids[rows[0]]
            raise DataError(
                f"dataset '{dataset.name}': natural client {who} has no {side} row by the given test flags; "
                "use --test split, or drop the client."
            )
    return shard


def _given_flags(dataset: Dataset) -> np.ndarray:
    if dataset.is_test is None or dataset.is_test.all() or not dataset.is_test.any():
        state = "marks no test rows" if dataset.is_test is None else "does not have both test and training rows"
        raise DataError(f"dataset '{dataset.name}' {state}, so --test given cannot be used; use --test split.")
    return dataset.is_test


def _check_pfllib_split(test: str, test_fraction: float) -> None:
    if test == "given" or test_fraction != PFLLIB_TEST:
        wanted = "--test given" if test == "given" else f"test_fraction {test_fraction}"
        raise DataError(
            f"partition '{PFLLIB}' tests on its own random quarter of each client, so {wanted} cannot be used "
            "with it; leave that out, or use --partition dirichlet."
        )


def build(
    dataset: Dataset,
    *,
    partition: str,
    clients: int | None,
    seed: int,
    alpha: float = 0.1,
    classes_per_client: int = 2,
    test_fraction: float = 0.25,
    test: Literal["split", "given"] = "split",
) -> Federation:
    """Return a federation: the rows go to clients first, then each client's rows to training and testing.

    partition            iid, pathological, dirichlet or natural; or pfllib-compat, PFLlib's `dir` with PFLlib's own
                         split: a random quarter of each client's rows, official test rows among them
    clients              number of clients; 0 or None, with natural only, for as many as there are
    seed                 the same seed gives the same federation
    alpha                Dirichlet concentration (dirichlet and pfllib-compat only)
    classes_per_client   classes that each client holds (pathological only)
    test_fraction        share of a client's rows that it tests on (within a fifth, for even classes); inside (0, 1)
    test                 "split": all rows are dealt out, whatever the publisher set aside, and split anew.
                         "given": the dataset's test rows are never trained on. With natural clients they are
                         the clients' own test rows; with other partitions they are the global test set, and
                         the clients' own test rows come out of the training part

    Raises DataError when the data cannot be divided as asked; nothing is changed silently to make it fit.
    """
    if test not in ("split", "given"):
        raise DataError(f"test must be 'split' or 'given', but is '{test}'.")
    if not 0 < test_fraction < 1:
        raise DataError(f"test_fraction must lie between 0 and 1, both excluded, but is {test_fraction}.")
    is_test = _given_flags(dataset) if test == "given" else np.zeros(len(dataset.labels), dtype=np.bool_)
    options = {"clients": clients, "alpha": alpha, "classes_per_client": classes_per_client}
    if partition == PFLLIB:
        _check_pfllib_split(test, test_fraction)
        sides = pfllib_compat(dataset.labels, clients or 0, int(seed), alpha)
        shards = tuple(Shard(np.sort(train), np.sort(tested)) for train, tested in sides)
    elif partition == "natural" and test == "given":
        dealt = _deal(dataset, np.arange(len(is_test)), partition, int(seed), options)
        shards = tuple(_given_share(dataset, is_test, rows) for rows in dealt)
    else:
        dealt = _deal(dataset, np.flatnonzero(~is_test), partition, int(seed), options)
        shards = tuple(_split_share(dataset, rows, test_fraction, int(seed), i) for i, rows in enumerate(dealt))
    personal = np.sort(np.concatenate([shard.test for shard in shards]))
    common = np.flatnonzero(is_test) if test == "given" else personal
    return Federation(dataset, shards, _input_spec(dataset, shards), common)
