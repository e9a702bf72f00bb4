"""Running statistics that stay on the client, under any method: the policy `--buffers local`."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from pflsec.core.algorithm import Algorithm, Done
from pflsec.core.items import Items, prefixed, select, without_prefix
from pflsec.core.local import Local
from pflsec.core.network import buffer_in

OWN = "buffers"


class LocalBuffers(Algorithm[Any]):
    """A method whose messages hold no running statistics. Each client keeps its own, as `buffers.*` beside its state.

    The method itself knows nothing of this. On the client, its downlink comes with the client's own statistics; on the
    server, its uploads come with those that the server sent, so to speak: the ones it began with.
    """

    def __init__(self, inner: Algorithm[Any]):
        # What the class says of a method, this object says of the one inside.
        said = ("key", "Config", "shared", "private", "down", "up", "dp_support", "batchnorm", "batchable", "presets")
        vars(self).update({name: getattr(inner, name) for name in said})
        super().__init__(inner.cfg, inner.net, inner.clients)
        self.inner = inner
        self.contract = replace(inner.contract, omit=inner.contract.omit | inner.net.buffers)

    def init_server(self, fresh: Items) -> Items:
        return self.inner.init_server(fresh)

    def init_client(self, fresh: Items, server: Items) -> Items:
        return self.inner.init_client(fresh, server) | prefixed(OWN, self._buffers(self.inner.downlink(server, 0)))

    def enrol(self, server: Items, sizes: Sequence[int]) -> Items:
        return self.inner.enrol(server, sizes)

    def downlink(self, server: Items, client: int) -> Items:
        return self._bare(self.inner.downlink(server, client))

    def serve(self, server: Items, client: int) -> Items:
        return self._bare(self.inner.serve(server, client))

    def local(self, ctx: Local, state: Items, down: Items) -> Done:
        inner, received = self._inside(state, down)
        done = self.inner.local(ctx, inner, received)
        return Done(done.state | prefixed(OWN, self._kept(state, done.up)), self._bare(done.up))

    def aggregate(self, server: Items, ups: Mapping[int, Items]) -> Items:
        return self.inner.aggregate(server, {c: self._completed(up, self._sent(server, c)) for c, up in ups.items()})

    def deploy(self, state: Items, down: Items) -> Items:
        return self.inner.deploy(*self._inside(state, down))

    def deploy_trained(self, state: Items, down: Items, up: Items) -> Items:
        inner, received = self._inside(state, down)
        return self.inner.deploy_trained(inner, received, self._completed(up, received))

    @property
    def personalises(self) -> bool:
        return self.inner.personalises

    def personalise(self, ctx: Local, items: Items) -> Items:
        return self.inner.personalise(ctx, items)

    def scores(self, items: Items, x: Tensor) -> Tensor:
        return self.inner.scores(items, x)

    def global_model(self, server: Items) -> Items | None:
        """None: no model serves everybody, since the statistics of nobody are known."""
        return None

    def sampling_weights(self, sizes: Sequence[int]) -> Sequence[float] | None:
        return self.inner.sampling_weights(sizes)

    def observe(self, memory: Items, down: Items, up: Items) -> Items:
        inner, received = self._inside(memory, down)
        return self.inner.observe(inner, received, self._completed(up, received)) | select(memory, OWN)

    def reconstruct_state(self, memory: Items) -> Items | None:
        found = self.inner.reconstruct_state(self._inner_state(memory))
        return None if found is None else self._bare(found)

    def start(self, state: Items, down: Items) -> Items:
        return self._bare(self.inner.start(*self._inside(state, down)))

    @property
    def starts_at_downlink(self) -> bool:
        return self.inner.starts_at_downlink

    def change(self, state: Items, down: Items, up: Items, lr: float, steps: int) -> Items:
        inner, received = self._inside(state, down)
        return self._bare(self.inner.change(inner, received, self._completed(up, received), lr, steps))

    def _inside(self, state: Items, down: Items) -> tuple[Items, Items]:
        """Return state and downlink as the method sees them on the client."""
        return self._inner_state(state), down | without_prefix(OWN, state)

    def _inner_state(self, state: Items) -> Items:
        return {k: v for k, v in state.items() if not k.startswith(OWN + ".")}

    def _kept(self, state: Items, up: Items) -> Items:
        """Return the client's statistics after local work, from the upload that the method would have sent."""
        own = without_prefix(OWN, state)
        return {k: up[k] if k in up else v + up[f"delta.{k}"] if f"delta.{k}" in up else v for k, v in own.items()}

    def _sent(self, server: Items, client: int) -> Items:
        return self._buffers(self.inner.downlink(server, client))

    def _completed(self, up: Items, reference: Items) -> Items:
        """Return an upload with the statistics that the method's contract asks for: the reference's, or zeros."""
        contract = self.inner.contract
        for key in contract.up:
            names = contract.names(key)
            if key.endswith("?") and not up.keys() & set(names):
                continue
            for name in names:
                if (buffer := buffer_in(self.net, name)) and name not in up:
                    like = reference.get(name)
                    up = up | {name: torch.zeros(self.net.shapes[buffer]) if like is None else like}
        return up

    def _buffers(self, items: Items) -> Items:
        return {k: v for k, v in items.items() if buffer_in(self.net, k)}

    def _bare(self, items: Items) -> Items:
        return {k: v for k, v in items.items() if not buffer_in(self.net, k)}
