"""Overrides of torchtitan: its rotary embeddings rotate q and k by torch_rope. docs/integrations/others.md says how.

The tables are torchtitan's own, so checkpoints and angles stay what they were. The arithmetic is float32 in both, and
each element is rounded once, at the end.
"""

from dataclasses import dataclass

import torch
from torchtitan.config import derive, override
from torchtitan.models.common.rope import ComplexRoPE, CosSinRoPE, _maybe_wrap_positions

import torch_rope


class FusedComplexRoPE(ComplexRoPE):
    """Pairs (2i, 2i + 1): Llama 3, DeepSeek V3, Kimi K2."""

    @dataclass(kw_only=True, slots=True)
    class Config(ComplexRoPE.Config):
        pass

    def forward(self, query, key, positions=None):
        cos, sin = torch.view_as_real(self.cache).unbind(-1)  # views: [max_position, head_dim / 2] each
        positions = _maybe_wrap_positions(positions, query)
        return torch_rope.rotate_qk(query, key, cos, sin, positions=positions, interleaved=True)


class FusedCosSinRoPE(CosSinRoPE):
    """Pairs (i, i + head_dim / 2): Qwen3, gpt-oss."""

    @dataclass(kw_only=True, slots=True)
    class Config(CosSinRoPE.Config):
        pass

    def forward(self, query, key, positions=None):
        cos, _, sin, _ = self.cache.chunk(4, -1)  # the cache holds every angle twice
        positions = _maybe_wrap_positions(positions, query)
        return torch_rope.rotate_qk(query, key, cos, sin, positions=positions)


# exact: a subclass, such as the several axes of Qwen3.5, may keep something else in its cache.
@override(target=ComplexRoPE.Config, exact=True, description="interleaved rotation by torch_rope")
def complex_rope(config: ComplexRoPE.Config) -> FusedComplexRoPE.Config:
    return derive(config, FusedComplexRoPE.Config)


@override(target=CosSinRoPE.Config, exact=True, description="half-split rotation by torch_rope")
def cos_sin_rope(config: CosSinRoPE.Config) -> FusedCosSinRoPE.Config:
    return derive(config, FusedCosSinRoPE.Config)
