"""FedGen: the server trains a generator of features on the clients' heads; what it generates steadies local training.

Source   Zhu, Hong, Zhou, ICML 2021, arXiv 2105.10056, Algorithm 1; authors' code where preset authors says so.
Solves   clients  mean CE(h(r(x)), y) + alpha E CE(h(G(y', e)), y'),  y' ~ the label prior, e noise; r body, h head
         server   min over G of  E CE(mean over k of h_k(G(y', e)), y'),  h_k the heads that were uploaded
Wire     down body.*, head.*, label_prior, generator.in, generator.scale, generator.shift, generator.mean,
         generator.var, generator.out, generator.bias | up body.*, head.*, label_counts, num_samples
         (with head_only no body.*)
Private  nothing (with head_only: each client's own body)
Cost     FedAvg and one head pass on `generated` features a step; on the server generator_steps passes of every head.
Leaks    The label histogram of all rows used, exactly. Body: FedAvg's gradient, the generated term does not reach it.
         Head: that gradient and, times alpha, the one at generated features that the client drew.
Limits   alpha = beta = 0: FedAvg's model. First round: FedAvg's uploads, since the generator knows nothing yet.
Differs  alpha: paper 1, authors' code 10 * 0.98^t.  beta, diversity, noise, ensemble, smoothing: authors' code alone.
         Their factor `generated`/batch_size is 1 in their settings, and left out.
"""

from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from pflsec.core.algorithm import Algorithm, Done, PrivateStart, mean_of_uploads, sample_count
from pflsec.core.config import above, at_least, between, option
from pflsec.core.items import Items, detached, prefixed, select, without_prefix
from pflsec.core.local import Local, Penalty
from pflsec.core.streams import seed_from, stream
from pflsec.training import adam
from pflsec.training.local import cross_entropy

TRAINED = ("in", "scale", "shift", "out", "bias")
FLOOR = 1e-5  # of the decay of alpha and beta


class FedGenConfig(PrivateStart):
    alpha: float = at_least(0, default=1.0, about="weight of the generated loss", paper=1.0, code=10.0, pfllib=1.0)
    beta: float = at_least(
        0, default=0.0, about="weight of the distance to what the head sees in generated features", code=10.0
    )
    decay: float = between(0, 1, default=1.0, about="factor on alpha and beta every round", paper=1.0, code=0.98)
    generated: int = at_least(2, default=32, about="generated features a step", code=32, pfllib=10)
    noise: Literal["uniform", "gaussian"] = option(
        default="uniform",
        about="law of the noise, U(0, 1) or N(0, 1)",
        paper="gaussian",
        code="uniform",
        pfllib="uniform",
    )
    noise_dim: int = at_least(1, default=32, about="size of the noise", code=32, pfllib=512)
    hidden: int = at_least(1, default=256, about="hidden units of the generator", code=256, pfllib=512)
    generator_steps: int = at_least(0, default=50, about="steps of the generator a round", code=50, pfllib=1000)
    generator_lr: float = above(0, default=3e-4, about="Adam step size of the generator", code=3e-4, pfllib=0.005)
    generator_decay: float = at_least(0, default=1e-2, about="weight decay of the generator", code=1e-2, pfllib=0)
    ensemble: Literal["logits", "losses"] = option(
        default="logits",
        about="loss of the generator: of the heads' mean logits, or their losses weighted by label counts",
        paper="logits",
        code="losses",
    )
    diversity: float = at_least(0, default=0.0, about="weight of what keeps generated features apart", code=1.0)
    smoothing: float = at_least(0, default=0.0, about="added to every label count by the server", paper=0, code=1)
    head_only: bool = option(default=False, about="send the head alone; each client keeps a body of its own")
    weighting: Literal["samples", "uniform"] = option(
        default="samples", about="weights of the mean over uploads", paper="uniform", code="samples", pfllib="samples"
    )


class FedGen(Algorithm[FedGenConfig]):
    key, shared, private = "fedgen", ("body", "head"), ()
    Config = FedGenConfig
    down: ClassVar = {
        "body.*?": "weights", "head.*": "weights", "label_prior": "statistics [C]",
        "generator.in": "generator [h, n]", "generator.scale": "generator [h]", "generator.shift": "generator [h]",
        "generator.mean": "buffers [h]", "generator.var": "buffers [h]",
        "generator.out": "generator [d, h]", "generator.bias": "generator [d]",
    }  # fmt: skip
    up: ClassVar = {"body.*?": "weights", "head.*": "weights", "label_counts": "counts [C]", "num_samples?": "counts"}
    dp_support = "partial: label_counts is computed from raw data"
    batchnorm = "yes"
    presets: ClassVar = {
        "authors": {"alpha": 10.0, "beta": 10.0, "decay": 0.98, "ensemble": "losses", "diversity": 1.0,
                    "smoothing": 1.0, "lr": 0.01, "batch_size": 32, "participation": 0.5},
        "pfllib": {"private_start": "shared", "generated": 10, "noise_dim": 512, "hidden": 512, "generator_steps": 1000,
                   "generator_lr": 0.005, "generator_decay": 0.0, "lr": 0.005, "batch_size": 10, "local_epochs": 1},
    }  # fmt: skip

    def sent(self) -> tuple[str, ...]:
        """Return the parts of the network that cross the wire."""
        return ("head",) if self.cfg.head_only else self.shared

    def init_server(self, fresh: Items) -> Items:
        seed = seed_from(fresh)
        generator = self.new_generator(stream(self.key, seed, "start"), next(iter(fresh.values())).dtype)
        prior = generator["bias"].new_zeros(self.net.classes)
        facts = {"label_prior": prior, "seed": torch.tensor(seed), "turn": torch.tensor(0)}
        memory = adam.begin({k: generator[k] for k in TRAINED})
        return select(fresh, *self.sent()) | prefixed("generator", generator) | prefixed("adam", memory) | facts

    def init_client(self, fresh: Items, server: Items) -> Items:
        return select(fresh, "body") if self.cfg.head_only else {}

    def downlink(self, server: Items, client: int) -> Items:
        return select(server, *self.sent(), "label_prior", "generator")

    def local(self, ctx: Local, state: Items, down: Items) -> Done:
        generator, prior = without_prefix("generator", down), down["label_prior"]
        known = bool(prior.any()) and self.cfg.generator_steps > 0
        faded = max(self.cfg.decay**ctx.round, FLOOR) if known else 0.0
        alpha, beta = self.cfg.alpha * faded, self.cfg.beta * faded
        draws = ctx.rng("generated")

        def loss(model: Items, x: Tensor, y: Tensor) -> Tensor:
            eps = self.draw_noise(len(y), draws, x.dtype)
            taught = ctx.constant(self.net.head(model, generate(generator, eps, ctx.one_hot(y))).softmax(1))
            seen = self.net.logits(model, x)  # last: a head with BatchNorm adopts the statistics of data
            return cross_entropy(seen, y) + beta * F.kl_div(seen.log_softmax(1), taught, reduction="none").sum(1)

        model = ctx.fit(
            select(down, *self.sent()) | state,
            on=loss if beta else ctx.ce,
            penalty=self.generated_loss(alpha, generator, prior) if alpha else None,
        )
        counts = ctx.epochs * ctx.class_counts()
        weight = sample_count(ctx) if self.cfg.weighting == "samples" else {}
        up = select(model, *self.sent()) | {"label_counts": counts} | weight
        return Done(state={k: model[k] for k in state}, up=up)

    def generated_loss(self, alpha: float, generator: Items, prior: Tensor) -> Penalty:
        """Return alpha times the mean cross entropy on generated features of labels drawn from the prior."""

        def penalty(model: Items, rng: torch.Generator) -> Tensor:
            y = torch.multinomial(prior, self.cfg.generated, replacement=True, generator=rng)
            eps = self.draw_noise(len(y), rng, prior.dtype)
            z = generate(generator, eps, F.one_hot(y, self.net.classes).to(eps))
            return alpha * F.cross_entropy(self.net.head(model, z), y)

        return penalty

    def aggregate(self, server: Items, ups: Mapping[int, Items]) -> Items:
        server = server | mean_of_uploads(ups, *self.sent(), weighting=self.cfg.weighting)
        counts = torch.stack([up["label_counts"] for _, up in sorted(ups.items())]) + self.cfg.smoothing
        if not counts.any():
            return server
        server = server | {"label_prior": counts.sum(0) / counts.sum(), "turn": server["turn"] + 1}
        return server | self.train_generator(server, [select(up, "head") for _, up in sorted(ups.items())], counts)

    def train_generator(self, server: Items, heads: Sequence[Items], counts: Tensor) -> Items:
        """Return generator and optimiser after this round's steps; counts [S, C] are the clients' label counts."""
        generator, memory, cfg = without_prefix("generator", server), without_prefix("adam", server), self.cfg
        rng = stream(self.key, int(server["seed"]), int(server["turn"]))
        for _ in range(cfg.generator_steps):
            y = torch.multinomial(server["label_prior"], cfg.generated, replacement=True, generator=rng)
            eps = self.draw_noise(len(y), rng, counts.dtype)
            held = {k: generator[k].detach().requires_grad_() for k in TRAINED}
            h = before_norm(held, eps, F.one_hot(y, self.net.classes).to(eps))
            z = after_norm(held, h, h.mean(0), h.var(0, correction=0))
            loss = self.ensemble_loss(z, y, heads, counts) + cfg.diversity * alike(z, eps)
            slopes = dict(zip(held, torch.autograd.grad(loss, list(held.values())), strict=True))
            size = {"lr": cfg.generator_lr, "weight_decay": cfg.generator_decay}
            learnt, memory = adam.step(detached(held), memory, slopes, **size)
            running = {k: torch.lerp(generator[k], v, 0.1) for k, v in (("mean", h.mean(0)), ("var", h.var(0)))}
            generator = generator | learnt | detached(running)
        return prefixed("generator", generator) | prefixed("adam", memory)

    def ensemble_loss(self, z: Tensor, y: Tensor, heads: Sequence[Items], counts: Tensor) -> Tensor:
        """Return how far the uploaded heads together are from seeing y in z."""
        logits = torch.stack([self.net.head(head, z) for head in heads])
        if self.cfg.ensemble == "logits":
            return F.cross_entropy(logits.mean(0), y)
        share = counts / counts.sum(0).clamp(min=1)
        losses = torch.stack([F.cross_entropy(seen, y, reduction="none") for seen in logits])
        return (share[:, y] * losses).sum(0).mean()

    def draw_noise(self, count: int, rng: torch.Generator, dtype: torch.dtype) -> Tensor:
        """Return noise, [count, noise_dim]."""
        draw = torch.rand if self.cfg.noise == "uniform" else torch.randn
        return draw(count, self.cfg.noise_dim, generator=rng, dtype=dtype)

    def new_generator(self, rng: torch.Generator, dtype: torch.dtype) -> Items:
        """Return a newly drawn generator: noise and label -> hidden units -> normalisation -> ReLU -> features."""
        cfg, d = self.cfg, self.net.feature_dim
        sizes = {"in": (cfg.hidden, cfg.noise_dim + self.net.classes), "out": (d, cfg.hidden), "bias": (d,)}
        bound = {"in": sizes["in"][1] ** -0.5, "out": cfg.hidden**-0.5, "bias": cfg.hidden**-0.5}
        drawn = {k: bound[k] * (2 * torch.rand(*size, generator=rng, dtype=dtype) - 1) for k, size in sizes.items()}
        one, zero = torch.ones(cfg.hidden, dtype=dtype), torch.zeros(cfg.hidden, dtype=dtype)
        return {"scale": one, "shift": zero, "mean": zero, "var": one} | drawn

    def deploy(self, state: Items, down: Items) -> Items:
        return select(down, *self.shared) | state

    def global_model(self, server: Items) -> Items | None:
        return None if self.cfg.head_only else select(server, *self.shared)

    def change(self, state: Items, down: Items, up: Items, lr: float, steps: int) -> Items:
        """The label histogram is left out: it is read, not matched."""
        seen = super().change(state, down, up, lr, steps)
        return {k: v for k, v in seen.items() if k != "label_counts"}


def before_norm(generator: Items, eps: Tensor, label: Tensor) -> Tensor:
    """Return the hidden units before their normalisation, [B, hidden]; label [B, C], one-hot or probabilities."""
    return F.linear(torch.cat([eps, label], 1), generator["in"])


def after_norm(generator: Items, h: Tensor, mean: Tensor, var: Tensor) -> Tensor:
    """Return the features [B, d] of hidden units that are normalised by these moments."""
    h = (h - mean) / (var + 1e-5).sqrt() * generator["scale"] + generator["shift"]
    return F.linear(h.relu(), generator["out"], generator["bias"])


def generate(generator: Items, eps: Tensor, label: Tensor) -> Tensor:
    """Return the features [B, d] of a generator in use: normalised by its running moments, each row on its own."""
    return after_norm(generator, before_norm(generator, eps, label), generator["mean"], generator["var"])


def alike(z: Tensor, eps: Tensor) -> Tensor:
    """Return exp(-mean over pairs of |z_i - z_j| |e_i - e_j|^2), both means over coordinates: 1 for equal features."""
    apart = (z[:, None] - z).abs().mean(2) * (eps[:, None] - eps).square().mean(2)
    return torch.exp(-apart.mean())
