"""What a run will cost, measured on a few of its own batches before it starts."""

import os
import time
from dataclasses import dataclass

from pflsec.core.algorithm import Algorithm
from pflsec.core.change import origin
from pflsec.core.defense import StepDefense, of_kind
from pflsec.core.items import Items, size_in_bytes
from pflsec.runtime.defending import inside
from pflsec.runtime.executor import one_thread
from pflsec.runtime.feeding import feed
from pflsec.runtime.recorder import OUTSIDERS
from pflsec.runtime.setup import Setup
from pflsec.training.local import LocalWork

BATCHES = 3
EPOCHS = 5  # more are not measured but multiplied
WORTH_WORKERS = 60.0  # seconds
EVALUATION = 1.3  # testing everybody adds about this much to training
PRIVATE = 4.0  # a step on the account of single records takes about so many times as long as a bare one


def best_executor(wanted: str, seconds: float) -> str:
    """Return serial or processes for work of so many seconds: starting workers takes some, which short work does not repay."""
    if wanted != "auto":
        return wanted
    return "processes" if seconds > WORTH_WORKERS and (os.cpu_count() or 1) > 1 else "serial"


@dataclass(frozen=True)
class Cost:
    """Seconds of work and bytes on disk, roughly."""

    seconds: float
    bytes: int


def estimate(setup: Setup) -> Cost:
    """Return the cost of a run, from one client's local work on a few batches. What changes its gradients works in it, and its
    upload is defended; noised steps count by a factor."""
    config, federation, algorithm = setup.config, setup.federation, setup.algorithm
    client = max(range(federation.clients), key=lambda c: len(federation.shards[c].train))
    x, y = federation.train(client)
    part = slice(0, BATCHES * config.batch_size)
    server = setup.server_first
    down, state = algorithm.downlink(server, client), algorithm.init_client(setup.client_fresh(client), server)
    seconds, up = float("inf"), Items()
    epochs = min(config.local_epochs, EPOCHS)
    with one_thread():
        for _ in range(2):
            ctx = LocalWork(setup.net, x[part], y[part], config.lr, epochs, config.batch_size, config.seed, 0, client)
            ctx = inside(ctx, setup.defenses, "estimate")
            ctx.feed = feed(setup, 0, client, train=(ctx.x, ctx.y))
            began = time.perf_counter()
            up = algorithm.local(ctx, state, down).up
            seconds = min(seconds, time.perf_counter() - began)
        sending = _sending(setup, up, origin(algorithm, state, down, up), client)
    played = config.participation * (1 - config.drop_rate) * config.rounds
    work = seconds / len(y[part]) * sum(federation.sizes()) * max(1, config.local_epochs / EPOCHS)
    if of_kind(setup.defenses, StepDefense):
        work *= PRIVATE
    return Cost((work + sending * federation.clients) * played * EVALUATION, _disk(setup, down, up, state))


def _sending(setup: Setup, up: Items, reference: Items, client: int) -> float:
    """Return the seconds that the defenses of the wire take for an upload; 0 without any."""
    if not setup.channel.uplink:
        return 0.0
    began = time.perf_counter()
    setup.channel.send_up(up, reference, 0, client)
    return time.perf_counter() - began


def _disk(setup: Setup, down: Items, up: Items, state: Items) -> int:
    config = setup.config
    rounds, clients = len(config.captured_rounds()), len(config.captured_clients())
    victims = rounds * clients * config.victims
    broadcast = type(setup.algorithm).downlink is Algorithm.downlink
    pixels = 4 * setup.federation.dataset.images[0].size
    ups = 2 if setup.channel.uplink else 1  # as they were before the defenses too
    per_victim = ups * size_in_bytes(up) + size_in_bytes(state) + pixels * config.victim_batch
    pool = (1000 + OUTSIDERS * clients) * pixels if rounds else 0
    downs = size_in_bytes(down) * rounds * (1 if broadcast else clients)
    return victims * per_victim + downs + pool + 200 * config.rounds * config.clients
