"""Pictures of a BlockMask."""

import jax
import pytest

from jflex.block_mask.mask import create_block_mask
from tests.support.dense_masks import causal, random_mask

# --- drawing


def test_drawing():
    block_mask = create_block_mask(lambda b, h, q, kv: (q >= kv) & (h >= 0), 1, 6, 96, 90, block_size=32)
    picture = "░░    |\n██░░  |\n████░░|"
    expected = ["BlockMask(shape=(1, 6, 96, 90), block_size=(32, 32), sparsity=31.11%)"]
    expected += [f"batch 0, head {h}\n{picture}" for h in range(4)]
    assert str(block_mask) == "\n".join([*expected, "... and 2 more"])
    assert block_mask.to_string(limit=1) == "\n".join([*expected[:2], "... and 5 more"])


def test_drawing_coarsely():
    block_mask = create_block_mask(causal, None, None, 64 * 32, 64 * 32, block_size=64)
    lines = block_mask.to_string((4, 2)).splitlines()[2:]
    assert lines == ["░░  |", "░░  |", "██░░|", "██░░|"]
    assert len(str(block_mask).splitlines()) == 2 + 16
    assert len(block_mask.to_string(None).splitlines()) == 2 + 32


def test_drawing_under_jit_gives_shapes():
    seen = []
    jax.jit(lambda mask: seen.append(repr(mask)))(create_block_mask(causal, None, None, 64, 64))
    assert seen == ["BlockMask(shape=(1, 1, 64, 64), block_size=(128, 128))"]


def test_image(tmp_path):
    pytest.importorskip("matplotlib")
    block_mask, values = random_mask(4)
    figure = block_mask.to_image(1, 0, zoom=(slice(10, 40), slice(None, 20)))
    assert f"elements, {values[1, 0, 10:40, :20].sum()} of 600 visible" == figure.axes[1].get_title()
    figure.savefig(tmp_path / "mask.png")
    assert (tmp_path / "mask.png").stat().st_size > 1000
    assert len(block_mask.to_image().axes) == 1
    with pytest.raises(IndexError):
        block_mask.to_image(2)
