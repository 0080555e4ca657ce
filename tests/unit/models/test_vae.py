"""Latents in both directions: one number or one per channel, four axes outside whatever the network has inside."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from diffusers import AutoencoderKL, AutoencoderKLFlux2, AutoencoderKLQwenImage

from inweave.errors import FormatError
from inweave.models import vae
from inweave.models.vae import LatentSpace

MEAN, STD = [0.5, -1.0, 2.0, 0.0], [1.0, 2.0, 0.5, 4.0]


def image_vae() -> Any:
    torch.manual_seed(0)
    return AutoencoderKL(  # type: ignore[attr-defined]
        block_out_channels=(8, 8, 8), down_block_types=("DownEncoderBlock2D",) * 3,
        up_block_types=("UpDecoderBlock2D",) * 3,
        latent_channels=4, norm_num_groups=4, scaling_factor=0.3, shift_factor=0.1,
    ).eval()  # fmt: skip


def video_vae() -> Any:
    torch.manual_seed(0)
    return AutoencoderKLQwenImage(  # type: ignore[attr-defined]
        base_dim=8, z_dim=4, dim_mult=[1, 1, 1], num_res_blocks=1, temperal_downsample=[False, True], latents_mean=MEAN,
        latents_std=STD,
    ).eval()  # fmt: skip


def patched_vae() -> Any:
    torch.manual_seed(0)
    network = AutoencoderKLFlux2(  # type: ignore[attr-defined]
        block_out_channels=(8, 8), down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2, latent_channels=1, norm_num_groups=4,
    ).eval()  # fmt: skip
    network.bn.running_mean.copy_(torch.tensor(MEAN))
    network.bn.running_var.copy_(torch.tensor(STD) ** 2 - network.bn.eps)
    return network


def test_one_number_for_all_channels() -> None:
    space = LatentSpace.of(image_vae().config)
    assert space == LatentSpace(4, 4, (0.1,), (0.3,))
    assert space.shape(64, 32, 2) == (2, 4, 8, 16)
    hidden = torch.randn(1, 4, 8, 8)
    assert torch.equal(space.normalize(hidden), (hidden - 0.1) * 0.3)
    torch.testing.assert_close(space.denormalize(space.normalize(hidden)), hidden)


def test_one_number_per_channel_and_a_frame_axis() -> None:
    space = LatentSpace.of(video_vae().config)
    assert (space.channels, space.scale, space.frames) == (4, 4, True)
    hidden = torch.randn(2, 4, 8, 8)
    mean, std = (torch.tensor(values).view(1, 4, 1, 1) for values in (MEAN, STD))
    torch.testing.assert_close(space.normalize(hidden), (hidden - mean) / std)
    torch.testing.assert_close(space.denormalize(hidden), hidden * std + mean)


def test_patches_are_channels_normalized_by_a_batch_norm() -> None:
    """As its own module normalizes; without weights only shapes are known."""
    network = patched_vae()
    space = vae.latent_space(network)
    assert (space.channels, space.scale, space.patch, space.frames) == (4, 4, 2, False)
    assert space.shape(64, 32) == (1, 4, 8, 16)
    hidden = torch.randn(2, 1, 16, 32)
    patches = torch.stack([hidden[:, 0, row::2, column::2] for row in (0, 1) for column in (0, 1)], 1)
    torch.testing.assert_close(space.normalize(hidden), network.bn(patches))
    torch.testing.assert_close(space.denormalize(space.normalize(hidden)), hidden)
    plain = LatentSpace.of(network.config, network.to("meta").bn)
    assert plain == LatentSpace.of(network.config) == LatentSpace(4, 4, patch=2)
    with pytest.raises(FormatError, match="patches of 2x1"):
        LatentSpace.of({**network.config, "patch_size": (2, 1)})


@torch.no_grad()
@pytest.mark.parametrize("make", [image_vae, video_vae, patched_vae])
def test_images_and_latents_have_four_axes(make: Any) -> None:
    network, image = make(), torch.rand(1, 3, 32, 64) * 2 - 1
    likely = vae.encode(network, image, None)
    mean, std = vae.encode_distribution(network, image)
    assert likely.shape == mean.shape == std.shape == LatentSpace.of(network.config).shape(64, 32)
    assert torch.equal(likely, mean) and bool((std > 0).all())
    sampled = vae.encode(network, image, torch.Generator().manual_seed(0))
    assert not torch.equal(sampled, mean)
    assert vae.decode(network, mean).shape == image.shape


@torch.no_grad()
@pytest.mark.parametrize("make", [image_vae, video_vae])
def test_tiling_is_used_on_out_of_memory_and_disabled_afterwards(make: Any) -> None:
    network = make()
    latents, warnings = torch.randn(1, 4, 64, 64), list[str]()
    before = vars(network).copy()
    decoder = network.decoder.forward

    def limited(hidden: torch.Tensor, *rest: Any, **options: Any) -> Any:
        if hidden.shape[-1] > 32:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return decoder(hidden, *rest, **options)

    network.decoder.forward = limited
    assert vae.decode(network, latents, warnings.append).shape == (1, 3, 256, 256)
    assert warnings == ["not enough memory to decode the image at once; it was decoded in tiles of 128 pixels"]
    assert all(vars(network)[name] == before[name] for name in before if name.startswith(("use_tiling", "tile_")))


def test_without_a_shift_factor_nothing_is_shifted() -> None:
    assert LatentSpace.of({**image_vae().config, "shift_factor": None}).shift == (0.0,)
