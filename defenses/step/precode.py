"""PRECODE: a variational bottleneck between body and head, so that every gradient follows a draw of noise.

Source   Scheliga, Mäder, Seeland, WACV 2022, arXiv 2108.04725, section 4; width 256 and beta 1e-3 are its.
Seam     step, without an account; the network of server and clients is longer from the first round on
Solves   min  mean CE(head(D(z)), y) + beta mean KL(N(mu, s^2) || N(0, 1)),  z = mu + s eps,  eps ~ N(0, 1)
         over body, head, encoder E (body(x) to mu and log s^2, linear) and decoder D (z to what the head reads, linear)
Claims   none. Of one image the decoder's gradient gives z away, and with it the noise; layers in front of the bottleneck leak
         as ever (Balunovic et al., ICLR 2022, arXiv 2111.04706): a linear layer that reads the image gives it away.
Knob     width, beta. No setting is the identity, since the network stays longer; its other parameters start as without it.
Limits   E and D are part of the body (body.precode.*) and go where it goes. Noise is drawn and the divergence counted in
         every pass of a training step through an encoder that the step trains. All others decode mu: tests, prototypes, mean
         outputs, teachers, heads that are fitted alone, and the fit that a method makes before use. Reported losses contain
         the divergence. Only networks whose head reads a vector, and no dp-sgd. An attacker who knows of it replays the
         divergence and, for one step on one image, the noise as a function of the guess: at the truth that is exact, unless
         the upload is noised too or another pass of the work has noise of its own. Of batches and of several steps the noise
         stays unknown: the replay decodes mu, and what noise moves most (E, D, weights of the head) says nothing, as in Scheliga
         et al. 2022, arXiv 2208.04767; but a head that is sent alone is compared.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from pflsec.core.config import Config, at_least
from pflsec.core.defense import ModelDefense
from pflsec.core.errors import ConfigError
from pflsec.core.items import Items
from pflsec.core.linear import single_input
from pflsec.core.local import Local, LossPerExample
from pflsec.core.network import Net
from pflsec.core.streams import stream

Sample = Callable[[Tensor, Tensor, Local], Tensor]
"""(mean, log variance, the local work), [B, width] each -> the code z [B, width]."""
DECODER = "precode.decoder"
UNEXPLAINED = 0.1  # share of the decoder's squared gradient beside one code: more of it is of several codes, or noise


class PrecodeConfig(Config):
    width: int = at_least(1, default=256, about="numbers in the bottleneck", paper=256)
    beta: float = at_least(0, default=1e-3, about="weight of the divergence from N(0, 1)", paper=1e-3)


class Bottleneck(nn.Module):
    """A linear encoder to mean and log variance, and a linear decoder of the code z: [B, k] to [B, k]. The code is the mean,
    but for passes in the block of `sampling` that train the encoder."""

    def __init__(self, features: int, width: int):
        super().__init__()
        self.encoder = nn.Linear(features, 2 * width)
        self.decoder = nn.Linear(width, features)
        self._sample: Callable[[Tensor, Tensor], Tensor] | None = None

    def forward(self, h: Tensor) -> Tensor:
        mean, log_var = self.encoder(h).chunk(2, 1)
        if self._sample is None or not self.encoder.bias.requires_grad:  # a teacher's parameters are constants
            return self.decoder(mean)
        return self.decoder(self._sample(mean, log_var))

    @contextmanager
    def sampling(self, sample: Callable[[Tensor, Tensor], Tensor]) -> Iterator[list[Tensor]]:
        """Take codes from `sample`, and yield the divergence of every pass that did, 0-d: the mean over its batch."""
        divergences: list[Tensor] = []

        def noted(mean: Tensor, log_var: Tensor) -> Tensor:
            divergences.append(divergence(mean, log_var).mean())
            return sample(mean, log_var)

        self._sample = noted
        try:
            yield divergences
        finally:
            self._sample = None


def divergence(mean: Tensor, log_var: Tensor) -> Tensor:
    """Return KL(N(mean, exp(log_var)) || N(0, 1)), summed over the width, [B]."""
    return (mean.square() + log_var.exp() - log_var - 1).sum(1) / 2


class Precode(ModelDefense[PrecodeConfig]):
    key = "precode"
    Config = PrecodeConfig

    def layer(self, features: tuple[int, ...]) -> Bottleneck:
        if len(features) != 1:
            raise ConfigError(
                f"precode: the head reads {list(features)} of an input, and the bottleneck takes a vector. Cut the network where "
                "it has one (--split), by default before its last layer."
            )
        return Bottleneck(*features, self.cfg.width)

    def at(self, net: Net, *key: int | str) -> "Prepared":
        return Prepared(self.cfg, net, drawn(stream(*key)))

    def known(self, net: Net, said: Items, single: bool) -> "Prepared":
        found = read_code(said) if single else None
        return Prepared(self.cfg, net, decoded) if found is None else Prepared(self.cfg, net, followed(found))


class Prepared(Precode):
    """PRECODE in one local work: the client's, whose codes are drawn, or a replay of it."""

    def __init__(self, cfg: PrecodeConfig, net: Net, sample: Sample):
        super().__init__(cfg)
        assert isinstance(net.inserted, Bottleneck)  # networks of a run are built with its defenses
        self.bottleneck, self.sample = net.inserted, sample

    def objective(self, on: LossPerExample, ctx: Local) -> LossPerExample:
        def loss(params: Items, x: Tensor, y: Tensor) -> Tensor:
            with self.bottleneck.sampling(lambda mean, log_var: self.sample(mean, log_var, ctx)) as divergences:
                found = on(params, x, y)
            return found + self.cfg.beta * sum(divergences)

        return loss

    def adapt(self, guess: Items, seen: Items) -> Items:
        """Where the noise is unknown, take what it has moved most as it was sent: all but what lies in front, and the bias that
        tells labels."""
        if self.sample is not decoded:
            return guess
        left = {k: v for k, v in guess.items() if not _noisy(k)}
        return guess | {k: seen[k].to(v.dtype) for k, v in guess.items() if left and k not in left and k in seen}


def _noisy(name: str) -> bool:
    """Return whether an item is the bottleneck's, or a weight behind it."""
    words = name.split(".")
    return "precode" in words or ("head" in words and words[-1] != "bias")


def drawn(rng: torch.Generator) -> Sample:
    """Return how a client takes codes: with fresh noise."""

    def sample(mean: Tensor, log_var: Tensor, ctx: Local) -> Tensor:
        return mean + (log_var / 2).exp() * torch.randn(mean.shape, generator=rng, dtype=mean.dtype)

    return sample


def decoded(mean: Tensor, log_var: Tensor, ctx: Local) -> Tensor:
    """Take the code as an attacker does who cannot know the noise: without any."""
    return mean


def followed(code: Tensor) -> Sample:
    """Return how an attacker takes codes who knows the one that was drawn [1, width]: with the noise that leads to it from the
    guess. A step holds that noise constant; a guess moves it."""

    def sample(mean: Tensor, log_var: Tensor, ctx: Local) -> Tensor:
        deviation = (log_var / 2).exp()
        return mean + deviation * ctx.constant((code.to(mean.dtype) - mean) / deviation)

    return sample


def read_code(said: Items) -> Tensor | None:
    """Return the code [1, width] behind the gradient of the decoder, where it is there and one code is behind it."""
    weight, bias = ([v for k, v in said.items() if k.endswith(f"{DECODER}.{name}")] for name in ("weight", "bias"))
    return code(weight[0], bias[0]) if len(weight) == len(bias) == 1 else None


def code(weight: Tensor, bias: Tensor) -> Tensor | None:
    """Return the input [1, width] of a linear layer in one pass of one input, from the gradients of its weight and bias, or
    None where these are not of one input."""
    if not bias.square().sum() > 0:
        return None
    found = single_input(weight, bias)
    left = (weight - bias[:, None] * found).square().sum()
    return found[None] if left <= UNEXPLAINED * weight.square().sum() else None
