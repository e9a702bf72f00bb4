"""Who holds which rows. Every scheme is bounded: it gives what was asked for, or says why it cannot.

A scheme takes one label (or id) per row and one generator, and returns one sorted int64 array of row
positions per client. The arrays are disjoint, cover all rows, and hold at least two rows each: one to train
on and one to test on.

`pfllib_compat` alone divides each client's rows into training and test rows as well, as PFLlib does.
"""

import math
from typing import Any

import numpy as np
from numpy.random import Generator, RandomState

from pflsec.core.errors import DataError, unknown

SCHEMES = ("iid", "pathological", "dirichlet", "natural")
PFLLIB = "pfllib-compat"
LEAST = 2
CLOSE = 0.1
PFLLIB_TEST = 0.25
PFLLIB_TRIES = 1000

Parts = list[np.ndarray]


def _whole(what: str, value: Any, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < least:
        raise DataError(f"{what} must be a whole number of at least {least}, but is {value!r}.")
    return int(value)


def _checked(labels: np.ndarray, clients: int) -> np.ndarray:
    """Return the labels as a vector; DataError when so many clients cannot get two rows each."""
    vector = np.asarray(labels)
    if vector.ndim != 1 or vector.dtype.kind not in "iu":
        raise DataError(f"a partition needs a vector of whole numbers, but got {vector.dtype} {list(vector.shape)}.")
    _whole("clients", clients, 1)
    if len(vector) < LEAST * clients:
        raise DataError(
            f"{clients} clients were asked for, but there are {len(vector)} rows, and every client needs at "
            f"least {LEAST} (one to train on, one to test on); ask for at most {len(vector) // LEAST}, or "
            "use more data."
        )
    return vector


def iid(labels: np.ndarray, clients: int, rng: Generator) -> Parts:
    """Return a uniformly random partition into shares whose sizes differ by at most one row.

    Raises DataError when there are fewer than two rows per client.
    """
    rows = rng.permutation(len(_checked(labels, clients)))
    return [np.sort(part) for part in np.array_split(rows, clients)]


def pathological(labels: np.ndarray, clients: int, rng: Generator, classes_per_client: int) -> Parts:
    """Return a partition where every client holds exactly `classes_per_client` classes, drawn at random.

    Every class that occurs has an owner, the numbers of owners are as equal as the rows allow, and the owners
    of a class share its rows equally (sizes differ by at most one). Raises DataError when that is impossible:
    more classes per client than there are, fewer places than classes, or too few rows for a class's owners.
    """
    labels = _checked(labels, clients)
    per_client = _whole("classes_per_client", classes_per_client, 1)
    classes, rows = np.unique(labels, return_counts=True)
    if per_client > len(classes):
        raise DataError(
            f"classes_per_client is {per_client}, but only {len(classes)} classes occur; use at most {len(classes)}."
        )
    if per_client * clients < len(classes):
        raise DataError(
            f"{clients} clients with {per_client} classes each have {per_client * clients} places for "
            f"{len(classes)} classes, so some class would belong to nobody; use at least "
            f"{math.ceil(len(classes) / per_client)} clients, or {math.ceil(len(classes) / clients)} classes "
            "per client."
        )
    owners = _owner_counts(classes, rows, clients, per_client, rng)
    parts: list[list[np.ndarray]] = [[] for _ in range(clients)]
    room = np.full(clients, per_client)
    for i in rng.permutation(len(classes)):
        # Those with the most room come first: so the room of any two clients differs by at most one, and the
        # last class still finds enough different clients.
        chosen = np.lexsort((rng.random(clients), -room))[: owners[i]]
        room[chosen] -= 1
        shuffled = rng.permutation(np.flatnonzero(labels == classes[i]))
        for client, share in zip(chosen, np.array_split(shuffled, len(chosen)), strict=True):
            parts[client].append(share)
    return [np.sort(np.concatenate(shares)) for shares in parts]


def _owner_counts(classes: np.ndarray, rows: np.ndarray, clients: int, per_client: int, rng: Generator) -> np.ndarray:
    """Return the number of owners of each class: at least 1, in total clients * per_client, nearly equal."""
    each = LEAST if per_client == 1 else 1
    most = np.minimum(rows // each, clients)
    if most.min() < 1:
        raise DataError(
            f"class {classes[most.argmin()]} has {rows[most.argmin()]} row, but its owner would hold nothing "
            f"else and needs {LEAST}; use at least 2 classes per client."
        )
    if most.sum() < clients * per_client:
        raise DataError(
            f"{clients} clients with {per_client} classes each need {clients * per_client} shares of "
            f"classes, but the classes have rows for {most.sum()}; use fewer clients, or more data."
        )
    owners = np.ones(len(classes), dtype=np.int64)
    left = clients * per_client - len(classes)
    while left:
        more = rng.permutation(np.flatnonzero(owners < most))[:left]
        owners[more] += 1
        left -= len(more)
    return owners


def _proportions(clients: int, rng: Generator, alpha: float) -> np.ndarray:
    """Return one draw of Dirichlet(alpha, ..., alpha), [clients], for any positive alpha.

    Gamma(alpha) is drawn as Gamma(alpha + 1) * U ** (1 / alpha), in logarithms: for a small alpha every draw
    is below the smallest float, and dividing by their sum would be 0 / 0.
    """
    uniform = 1.0 - rng.random(clients)
    with np.errstate(over="ignore"):
        logs = np.log(rng.standard_gamma(alpha + 1.0, clients)) + np.log(uniform) / alpha
    if not np.isfinite(logs.max()):
        # Beyond the range of logarithms too: the limits are equal shares, and one client with everything.
        return np.full(clients, 1 / clients) if alpha > 1 else np.eye(clients)[uniform.argmax()]
    mass = np.exp(logs - logs.max())
    return mass / mass.sum()


def _check_alpha(alpha: Any) -> None:
    if isinstance(alpha, bool) or not isinstance(alpha, int | float | np.number) or not 0 < alpha < math.inf:
        raise DataError(f"alpha must be a positive, finite number (e.g. 0.1), but is {alpha!r}.")


def dirichlet(labels: np.ndarray, clients: int, rng: Generator, alpha: float, min_rows: int | None = None) -> Parts:
    """Return a label-skewed partition: each class is divided in proportions drawn from Dirichlet(alpha).

    alpha      concentration, > 0: small values give clients with one or two classes, large ones equal shares
    min_rows   rows that every client gets at least; clients below it are filled from the largest ones, a
               class at a time. By default 10, or half of the mean share where that is less, but at least 2

    Raises DataError for an alpha that is not positive and finite, and for more than rows / clients min_rows.
    """
    labels = _checked(labels, clients)
    _check_alpha(alpha)
    if min_rows is None:
        min_rows = max(LEAST, min(10, len(labels) // (2 * clients)))
    if _whole("min_rows", min_rows, LEAST) * clients > len(labels):
        raise DataError(
            f"{clients} clients with at least {min_rows} rows each need {min_rows * clients} rows, but there "
            f"are {len(labels)}; ask for fewer clients or fewer rows each, or use more data."
        )
    owner = np.empty(len(labels), dtype=np.int64)
    for label in np.unique(labels):
        rows = rng.permutation(np.flatnonzero(labels == label))
        cuts = np.rint(np.cumsum(_proportions(clients, rng, float(alpha)))[:-1] * len(rows)).astype(np.int64)
        owner[rows] = np.searchsorted(cuts, np.arange(len(rows)), side="right")
    _fill(owner, labels, clients, min_rows, rng)
    return _by_owner(owner, clients)


def _fill(owner: np.ndarray, labels: np.ndarray, clients: int, min_rows: int, rng: Generator) -> None:
    """Change `owner` in place until every client has min_rows; a step moves one or more rows of one class."""
    sizes = np.bincount(owner, minlength=clients)
    for poor in np.flatnonzero(sizes < min_rows):
        while sizes[poor] < min_rows:
            # While anyone is below min_rows the largest client is above it, and has something to give.
            rich = sizes.argmax()
            held = rng.permutation(np.flatnonzero(owner == rich))
            held = held[labels[held] == labels[held[0]]]
            moved = held[: min(min_rows - sizes[poor], sizes[rich] - min_rows)]
            owner[moved] = poor
            sizes[poor] += len(moved)
            sizes[rich] -= len(moved)


def _by_owner(owner: np.ndarray, clients: int) -> Parts:
    order = np.argsort(owner, kind="stable")
    return np.split(order, np.cumsum(np.bincount(owner, minlength=clients))[:-1])


def natural(ids: np.ndarray, clients: int | None = None) -> Parts:
    """Return one share per distinct id, ordered by id.

    clients is the number of ids, or 0 or None for "as many as there are". Raises DataError when it is another
    number, or when an id has fewer than two rows.
    """
    ids = _checked(ids, 1)
    distinct, inverse, counts = np.unique(ids, return_inverse=True, return_counts=True)
    if clients and clients != len(distinct):
        raise DataError(
            f"the data have {len(distinct)} natural clients, but {clients} were asked for; "
            f"ask for {len(distinct)}, or for 0, which means as many as there are."
        )
    if counts.min() < LEAST:
        raise DataError(
            f"natural client {distinct[counts.argmin()]} has {counts.min()} row, and every client needs at "
            f"least {LEAST} (one to train on, one to test on); drop it, or merge it with another."
        )
    return _by_owner(inverse, len(distinct))


def assign(
    scheme: str,
    rng: Generator,
    *,
    labels: np.ndarray,
    ids: np.ndarray | None,
    clients: int | None,
    alpha: float,
    classes_per_client: int,
) -> Parts:
    """Return the partition by the scheme with this name; options of other schemes are not looked at.

    Raises DataError for an unknown scheme, for natural without ids, and for what the scheme itself refuses.
    """
    if scheme == "natural":
        if ids is None:
            raise DataError("partition 'natural' needs client ids, and the data have none; choose another partition.")
        return natural(ids, clients)
    count = _whole("clients", clients, 1)
    match scheme:
        case "iid":
            return iid(labels, count, rng)
        case "pathological":
            return pathological(labels, count, rng, classes_per_client)
        case "dirichlet":
            return dirichlet(labels, count, rng, alpha)
    raise DataError(unknown("partition", scheme, (*SCHEMES, PFLLIB)))


def pfllib_compat(labels: np.ndarray, clients: int, seed: int, alpha: float) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return PFLlib's partition `dir` with PFLlib's own split: (train, test) row positions of each client.

    Positions stand in the order in which PFLlib saves the rows; they are not sorted. With the official training
    rows followed by the official test rows, alpha 0.1 and seed 1 these are, row by row, the clients that PFLlib's
    generators write. So the official test rows are trained on too, a quarter of each client is drawn without
    regard to class, and a client that holds its share of the rows gets none of the following classes.

    seed   of NumPy's legacy generator, whose streams never change: below 2 ** 32

    PFLlib draws again, without end, until the smallest client has 40 rows (or half of the mean share, where that
    is less). Raises DataError when PFLLIB_TRIES draws were not enough, and for requests no draw can meet.
    """
    labels = _checked(labels, clients)
    _check_alpha(alpha)
    if _whole("seed", seed, 0) >= 2**32:
        raise DataError(f"partition '{PFLLIB}' needs a seed below 2^32, but got {seed}; PFLlib itself uses 1.")
    rng = RandomState(seed)
    # PFLlib cannot split a client with one row; such a draw is repeated here.
    least = max(LEAST, int(min(10 / PFLLIB_TEST, len(labels) / clients / 2)))
    for _ in range(PFLLIB_TRIES):
        parts = _pfllib_draw(labels, clients, rng, float(alpha))
        if min(len(part) for part in parts) >= least:
            return [_pfllib_split(part, rng) for part in parts]
    raise DataError(
        f"partition '{PFLLIB}' was drawn {PFLLIB_TRIES} times, but never gave each of {clients} clients {least} rows "
        f"with alpha {alpha}; use a larger alpha or fewer clients, or partition 'dirichlet', which always ends."
    )


def _pfllib_draw(labels: np.ndarray, clients: int, rng: RandomState, alpha: float) -> Parts:
    held: list[list[np.ndarray]] = [[] for _ in range(clients)]
    sizes = np.zeros(clients, dtype=np.int64)
    for label in np.unique(labels):
        rows = np.flatnonzero(labels == label)
        rng.shuffle(rows)
        mass = rng.dirichlet(np.full(clients, alpha)) * (sizes < len(labels) / clients)
        if mass.sum() > 0:
            cuts = (np.cumsum(mass / mass.sum())[:-1] * len(rows)).astype(np.int64)
        else:  # A tiny alpha: everything went to clients that are full, or was 0 / 0. The last client gets the class.
            cuts = np.zeros(clients - 1, dtype=np.int64)
        for client, share in enumerate(np.split(rows, cuts)):
            held[client].append(share)
            sizes[client] += len(share)
    return [np.concatenate(shares) for shares in held]


def _pfllib_split(rows: np.ndarray, rng: RandomState) -> tuple[np.ndarray, np.ndarray]:
    """Return (train, test) rows, shuffled: one permutation, whose first quarter, rounded up, is tested on."""
    order = rows[rng.permutation(len(rows))]
    tested = len(rows) - math.floor((1 - PFLLIB_TEST) * len(rows))
    return order[tested:], order[:tested]


def split(labels: np.ndarray, groups: np.ndarray, fraction: float, rng: Generator) -> tuple[np.ndarray, np.ndarray]:
    """Return (train, test) positions of one client's rows, at least two: sorted, and neither side empty.

    labels     [n] class of each row. A class with two or more rows has rows on both sides; one with a single
               row is trained on, unless that leaves nothing to test on
    groups     [n] rows with the same number (copies of one image) stay on one side, unless a class is nothing
               but copies of one image
    fraction   share of test rows, inside (0, 1)
    """
    _, first, inverse = np.unique(groups, return_index=True, return_inverse=True)
    stratum = labels[first][inverse]
    classes, sizes = np.unique(stratum, return_counts=True)
    in_test = np.zeros(len(labels), dtype=np.bool_)
    for label, wanted in zip(classes, _test_counts(sizes, fraction), strict=True):
        rows = np.flatnonzero(stratum == label)
        in_test[_test_rows(rows, groups[rows], int(wanted), rng)] = True
    if not in_test.any():
        in_test[rng.integers(len(labels))] = True
    return np.flatnonzero(~in_test), np.flatnonzero(in_test)


def _test_counts(sizes: np.ndarray, fraction: float) -> np.ndarray:
    """Return the number of test rows of each class: about `fraction` of it, between 1 and all but one.

    Rounding can tilt the classes of a small client. So fractions up to a fifth away are tried too, and the
    first is taken whose train and test class shares differ by less than CLOSE (total variation), or else the
    best one.
    """

    def distance(test: np.ndarray) -> float:
        train = sizes - test
        return float(np.abs(train / train.sum() - test / max(test.sum(), 1)).sum() / 2)

    nearby = (fraction * factor for factor in (1, 0.95, 1.05, 0.9, 1.1, 0.85, 1.15, 0.8, 1.2))
    tries = [np.minimum(np.maximum(np.rint(f * sizes), 1), sizes - 1).astype(np.int64) for f in nearby]
    return next((test for test in tries if distance(test) < CLOSE), min(tries, key=distance))


def _test_rows(rows: np.ndarray, groups: np.ndarray, wanted: int, rng: Generator) -> np.ndarray:
    """Return rows of one class to test on: whole groups, as many as fit into `wanted`, and at least one."""
    numbers, sizes = np.unique(groups, return_counts=True)
    if len(numbers) == 1:
        return rng.permutation(rows)[:wanted]
    chosen: list[int] = []
    for i in rng.permutation(len(numbers)):
        if sizes[i] <= wanted:
            wanted -= int(sizes[i])
            chosen.append(int(numbers[i]))
    return rows[np.isin(groups, chosen or numbers[sizes.argmin()])]
