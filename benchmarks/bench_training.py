"""Training and evaluation against a plain PyTorch loop, interleaved in one run: MNIST, 20 clients of at most 300 samples.

Marks: training of fedavg with two workers >= 1.3 times as fast as the loop (DataLoader, torch.optim.SGD, default threads),
with an MLP >= 2 times; evaluation of the same models on the same rows >= 2 times; fedrep >= 2 times the loop that runs both
phases in full.

    python -m benchmarks.bench_training mnist70k.npz [PAIRS]      images, labels, client (natural ids), is_test
"""

import statistics
import sys
import time
from contextlib import closing

import numpy as np
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.common import row, table
from pflsec.config.train import resolve
from pflsec.core import registry
from pflsec.data.datasets import Dataset, from_arrays
from pflsec.runtime.executor import one_thread
from pflsec.runtime.pool import Processes
from pflsec.runtime.rounds import Federated
from pflsec.runtime.setup import Setup, prepare

TRAIN, TEST, LR, BATCH = 300, 100, 0.005, 10


def mnist300(path: str) -> Dataset:
    """Return the first 300 training and 100 test rows of every natural client."""
    with np.load(path, allow_pickle=False) as file:
        images, labels, client, is_test = (file[k] for k in ("images", "labels", "client", "is_test"))
    keep = [
        rows[:most]
        for c in np.unique(client)
        for part, most in ((False, TRAIN), (True, TEST))
        for rows in [np.flatnonzero((client == c) & (is_test.astype(bool) == part))]
    ]
    rows = np.sort(np.concatenate(keep))
    ids, marks = client[rows].astype(np.int64), is_test[rows].astype(bool)
    return from_arrays(images[rows], labels[rows], client_ids=ids, is_test=marks, name="mnist300")


def plain_round(setup: Setup, head_epochs: int) -> tuple[float, float]:
    """Return seconds of (training, evaluation) of one round as one would write it without a library."""
    clients = range(setup.federation.clients)
    model = registry.load("models", setup.config.model)((1, 28, 28), 10)
    began = time.perf_counter()
    start, trained = {k: v.clone() for k, v in model.state_dict().items()}, []
    for client in clients:
        model.load_state_dict(start)
        loader = DataLoader(TensorDataset(*setup.federation.train(client)), batch_size=BATCH, shuffle=True)
        phases = [("fc.", head_epochs), ("", 1)] if head_epochs else [("", 1)]
        for prefix, epochs in phases:
            chosen = [p for name, p in model.named_parameters() if name.startswith(prefix)]
            optimiser = torch.optim.SGD(chosen, lr=LR)
            for _ in range(epochs):
                for x, y in loader:
                    model.zero_grad()
                    F.cross_entropy(model(x), y).backward()
                    optimiser.step()
        trained.append({k: v.clone() for k, v in model.state_dict().items()})
    middle = time.perf_counter()
    # What ours tests: each client's model as local work left it, and the model it uses next.
    for states in (trained, trained[-1:] * len(trained)):
        for client, state in zip(clients, states, strict=True):
            model.load_state_dict(state)
            loader = DataLoader(TensorDataset(*setup.federation.test(client)), batch_size=BATCH)
            with torch.no_grad():
                sum(int((model(x).argmax(1) == y).sum()) for x, y in loader)
    return middle - began, time.perf_counter() - middle


def compare(algo: str, model: str, dataset: Dataset, head_epochs: int, pairs: int) -> None:
    """Print the ratios plain / ours of one method."""
    options = {
        "algo": algo,
        "model": model,
        "partition": "natural",
        "test": "given",
        "rounds": 99,
        "lr": LR,
        "capture_rounds": "none",
    }
    if head_epochs:
        options["settings"] = {"head_epochs": head_epochs}
    setup = prepare(resolve(options), dataset)
    threads = torch.get_num_threads()
    with closing(Processes(setup, 2)) as pool:
        federated = Federated(setup, pool)
        with one_thread():
            federated.advance()
        ratios, steps = [], sum(-(-n // BATCH) for n in setup.federation.sizes())
        for _ in range(pairs):
            torch.set_num_threads(threads)
            plain = plain_round(setup, head_epochs)
            with one_thread():
                ours, _ = federated.advance()
            ratios.append((plain[0] / ours["seconds_train"], plain[1] / ours["seconds_eval"], ours["seconds_train"]))
    training, evaluation, seconds = (statistics.median(column) for column in zip(*ratios, strict=True))
    row([f"{algo}, {model}", training, evaluation, seconds, steps / seconds])


def main() -> None:
    if len(sys.argv) not in (2, 3):
        print("skipped: give the path of an npz file with MNIST (images, labels, client, is_test)")
        return
    dataset, pairs = mnist300(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) == 3 else 7
    table("Plain loop / ours, 2 workers", ["method", "training", "evaluation", "ours s/round", "main steps/s"], [])
    compare("fedavg", "cnn", dataset, 0, pairs)
    compare("fedavg", "mlp", dataset, 0, pairs)
    compare("fedrep", "cnn", dataset, 10, pairs)


if __name__ == "__main__":
    main()
