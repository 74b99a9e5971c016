"""What a network draws: the same numbers as without the library, laid out as the kernels lay them,
used for every derivative of the same call, and drawn once."""

from __future__ import annotations

import random

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import doubleback as db
from support.stock import assert_close, numbers, pair, same_training

# ---------------------------------------------------------------------- layouts of noise


class Images(nn.Module):
    """A convolution, noise on activations in some layout, and a head."""

    def __init__(self, noise, layout: str) -> None:
        super().__init__()
        self.conv, self.last = nn.Conv2d(2, 3, 2, stride=2), nn.Linear(3, 1)
        self.noise, self.layout = noise, layout

    def forward(self, x):
        h = self.conv(x)
        if self.layout == "channels last":
            h = h.contiguous(memory_format=torch.channels_last)
        elif self.layout == "permuted":
            h = h.transpose(1, 3)
        elif self.layout == "sliced":
            h = h[:, :, :, ::2]
        elif self.layout == "tokens":  # the stem of a vision transformer
            h = h.flatten(2).transpose(1, 2)
        h = self.noise(h)
        if self.layout == "tokens":
            return self.last(h).tanh().mean(1)
        if self.layout == "permuted":
            h = h.transpose(1, 3)
        return self.last(torch.tanh(h).mean((2, 3)))


def rrelu(h):
    return F.rrelu(h, training=True)


def dropout(h):
    return F.dropout(h, 0.4)


def dropout_in_place(h):
    return F.dropout(2 * h, 0.4, inplace=True)


def alpha_dropout(h):
    return F.alpha_dropout(h, 0.4, training=True)


def channel_dropout(h):
    return F.dropout2d(h, 0.4) if h.dim() == 4 else F.dropout1d(h, 0.4)


def channel_alpha_dropout(h):
    return F.feature_alpha_dropout(h, 0.4, training=True)


def uniform(h):
    return h * torch.rand_like(h)


def normal(h):
    return h + torch.randn_like(h) * h


def bernoulli(h):
    return h * torch.bernoulli(torch.full_like(h, 0.6))


def filled(h):
    return h * torch.empty_like(h).uniform_(0.5, 1.5)


def gumbel(h):
    return F.gumbel_softmax(h, dim=1)


NOISES = (
    rrelu, dropout, dropout_in_place, alpha_dropout, channel_dropout, channel_alpha_dropout,
    uniform, normal, bernoulli, filled, gumbel,
)  # fmt: skip


@pytest.mark.parametrize("layout", ["usual", "channels last", "permuted", "sliced", "tokens"])
@pytest.mark.parametrize("noise", NOISES)
def test_noise_in_every_layout(noise, layout):
    torch.manual_seed(0)
    model, twin = pair(Images(noise, layout))
    same_training(model, twin, batch=lambda i: (numbers(i, 4, 2, 6, 6),), steps=5)


@pytest.mark.parametrize("noise", [rrelu, dropout])
def test_noise_on_an_input_in_channels_last(noise):
    torch.manual_seed(0)
    model, twin = pair(Images(noise, "usual").to(memory_format=torch.channels_last))

    def batch(i):
        return (numbers(i, 4, 2, 6, 6).contiguous(memory_format=torch.channels_last),)

    same_training(model, twin, batch=batch, steps=5, how="accumulate")


class Mixer(nn.Module):
    """Token mixing: dropout behind a transposition, another one behind its inverse."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.channels, self.last = nn.Linear(4, 4), nn.Linear(6, 6), nn.Linear(6, 1)
        self.norm, self.drop = nn.LayerNorm(6), nn.Dropout(0.3)

    def forward(self, x):
        h = x + self.drop(F.gelu(self.tokens(self.norm(x).transpose(1, 2)))).transpose(1, 2)
        h = h + self.drop(F.gelu(self.channels(h.permute(0, 1, 2))))
        return self.last(h).mean(1)


@pytest.mark.parametrize("how", ["backward", "accumulate"])
def test_a_mixer(how):
    torch.manual_seed(0)
    model, twin = pair(Mixer())
    same_training(model, twin, batch=lambda i: (numbers(i, 3, 4, 6),), how=how)


# ----------------------------------------------------------------------- drawn once


@torch.library.custom_op("silent::jitter", mutates_args=())
def jitter(x: torch.Tensor) -> torch.Tensor:
    """x times numbers that it draws, without the tag that says so."""
    return x * (0.5 + torch.rand_like(x))


@jitter.register_fake
def _(x):
    return torch.empty_like(x)


def _keep(ctx, inputs, output):
    (x,) = inputs
    ctx.save_for_backward(x, output)


def _back(ctx, grad):
    x, output = ctx.saved_tensors
    return grad * output / x


jitter.register_autograd(_back, setup_context=_keep)


class Jittered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(5, 6), nn.Linear(6, 1)

    def forward(self, x):
        return self.last(torch.tanh(jitter(self.first(x))))


@pytest.mark.parametrize("how", ["backward", "accumulate"])
def test_a_custom_operator_that_draws(how):
    """Right, or refused in words that name it: its derivative must see the numbers that it drew."""
    torch.manual_seed(0)
    model, twin = pair(Jittered())
    try:
        same_training(model, twin, how=how)
    except db.DoublebackError as error:
        assert "silent.jitter" in str(error) and "draws random numbers" in str(error)
    x = numbers(0, 4, 5)
    torch.manual_seed(7)
    wanted = model.net(x)
    torch.manual_seed(7)
    assert_close(model.net(x), wanted, "the network itself")


class Seeded(nn.Module):
    """Seeds the generator in forward, for the same noise in every call."""

    def __init__(self, forked: bool) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(5, 6), nn.Linear(6, 1)
        self.forked = forked

    def noise(self, h):
        torch.manual_seed(3)
        return torch.rand_like(h)

    def forward(self, x):
        h = torch.tanh(self.first(x))
        if self.forked:
            with torch.random.fork_rng(devices=[]):
                noise = self.noise(h)
        else:
            noise = self.noise(h)
        return self.last(F.dropout(h * noise, 0.3))


@pytest.mark.parametrize("how", ["backward", "accumulate"])
@pytest.mark.parametrize("forked", [True, False])
def test_a_generator_that_forward_seeds(forked, how):
    torch.manual_seed(0)
    model, twin = pair(Seeded(forked))
    same_training(model, twin, how=how)


class OwnGenerator(nn.Module):
    """Draws from a generator of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(5, 6), nn.Linear(6, 1)
        self.source = None

    def forward(self, x):
        h = torch.tanh(self.first(x))
        noise = torch.rand(h.shape, dtype=h.dtype, generator=self.source)
        return self.last(h * noise)


@pytest.mark.parametrize("how", ["backward", "accumulate"])
def test_a_generator_of_its_own(how):
    torch.manual_seed(0)
    model, twin = pair(OwnGenerator())
    model.net.source = torch.Generator().manual_seed(5)
    twin.source = torch.Generator().manual_seed(5)
    same_training(model, twin, how=how, effects=lambda net: net.source.get_state().sum().item())


class PythonsGenerator(OwnGenerator):
    """A `random.Random`, whose numbers TorchDynamo would take for constants."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = random.Random(3)

    def forward(self, x):
        return self.last(torch.tanh(self.first(x)) * self.generator.random())


@pytest.mark.parametrize("how", ["backward", "accumulate"])
def test_a_generator_of_python_s(how):
    model, twin = pair(PythonsGenerator())
    same_training(model, twin, how=how)
