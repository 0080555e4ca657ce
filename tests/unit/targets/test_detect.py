"""How sure a detected base is: by tensors, by what else they fit, and by what the metadata says against it."""

from __future__ import annotations

import time
from collections.abc import Mapping

import pytest

from inweave.adapter import Adapter, TokenRows
from inweave.exchange.check import check
from inweave.formats.read import read
from inweave.targets.bases import KNOWN, KnownNetwork, known_index
from inweave.targets.compact import expand, expand_inner, pack
from inweave.targets.detect import detect
from inweave.targets.fit import stacked_shape
from inweave.targets.forms import FormIndex, form_index, form_of, numbers_in
from inweave.targets.index import Spelling
from inweave.targets.links import Naming
from tests.support import hollow, sized, stopwatch

Shapes = dict[str, tuple[int, ...]]
ATTENTION = ("attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0", "attn.add_q_proj", "attn.to_add_out",
             "attn1.to_q", "attn1.to_k", "attn2.to_q", "self_attention.to_query", "attention.to_q")  # fmt: skip


def lora(module: str, out: int, width: int) -> Shapes:
    return {f"{module}.lora_A.weight": (4, width), f"{module}.lora_B.weight": (out, 4)}


def adapter_of(
    shapes: Shapes, metadata: dict[str, str] | None = None, config: dict[str, object] | None = None
) -> Adapter:
    return read({key: hollow(shape) for key, shape in shapes.items()}, metadata, config)


def trained(base: str, leaves: tuple[str, ...] = ATTENTION, blocks: int | None = None) -> Shapes:
    """A LoRA on the modules of a base that end in ``leaves``, in diffusers names; of the first ``blocks`` blocks
    only.
    """
    denoiser = known_index(base).denoiser
    assert denoiser is not None
    shapes: Shapes = {}
    for part, shape in denoiser.parts.items():
        module = part.removesuffix(".weight")
        numbers = numbers_in(module)
        if len(shape) == 2 and part.endswith(".weight") and module.endswith(leaves):
            if blocks is None or not numbers or int(numbers[0]) < blocks:
                shapes |= lora(f"transformer.{module}", *shape)
    return shapes


KLEIN = trained("flux2-klein-4b", ("attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0"))
FLUX = trained("flux1-dev", ("attn.to_q", "attn.to_k", "attn.to_v", "norm.linear"))
HUNYUAN = trained("hunyuanvideo", ("attn.to_q", "attn.to_k", "attn.to_v"))


class TestEqualFits:
    def test_a_klein_file_is_not_taken_for_flux1(self) -> None:
        detection = detect(adapter_of(KLEIN))
        assert detection.base == "flux2-klein-4b"
        assert detection.confidence <= 0.8
        assert {"flux1-dev", "hunyuanvideo", "qwen-image"} <= set(detection.equals)

    def test_check_says_that_another_base_is_likelier(self) -> None:
        verdict = check(adapter_of(KLEIN), "flux1-dev", values="none")
        assert verdict.ok  # each tensor has a place there
        assert verdict.detected == "flux2-klein-4b"
        assert verdict.confidence <= 0.8
        assert any("flux2-klein-4b is likelier" in warning for warning in verdict.report.warnings)
        assert verdict.as_dict()["warnings"] == verdict.report.warnings

    def test_hunyuanvideo_is_not_flux(self) -> None:
        detection = detect(adapter_of(HUNYUAN))
        assert detection.base == "hunyuanvideo"
        assert not detection.fits_as_well("flux1-dev")

    def test_flux_is_not_hunyuanvideo_although_all_of_it_fits_there(self) -> None:
        detection = detect(adapter_of(FLUX))
        assert detection.base == "flux1-dev"
        assert detection.confidence == 0.8
        assert "hunyuanvideo" in detection.equals

    def test_flux_and_chroma_have_the_same_attention(self) -> None:
        detection = detect(adapter_of(trained("chroma1-hd", ("attn.to_q", "attn.to_k"))))
        assert detection.confidence == 0.7
        assert any("flux1-dev" in warning and "chroma1-hd" in warning for warning in detection.warnings)
        assert not any("hunyuanvideo" in warning for warning in detection.warnings)  # it has more blocks

    def test_a_few_blocks_fit_many_bases(self) -> None:
        detection = detect(adapter_of(trained("flux1-dev", ("attn.to_q", "attn.to_k"), blocks=3)))
        assert detection.confidence < 0.5
        assert len(detection.equals) > 5
        assert any("several bases fit equally" in warning for warning in detection.warnings)

    def test_auraflow_is_sure(self) -> None:
        detection = detect(adapter_of(trained("auraflow-0.3")))
        assert detection.base == "auraflow-0.3"
        assert detection.confidence == 1

    def test_a_model_with_more_blocks_than_any_base_is_no_base(self) -> None:
        """A model like Flux, with more blocks than any known base of its width."""
        deeper = {
            key: shape
            for block in range(64)
            for leaf in ("attn.to_q", "attn.to_k", "attn.to_v")
            for key, shape in lora(f"transformer.single_transformer_blocks.{block}.{leaf}", 3072, 3072).items()
        }
        detection = detect(adapter_of(deeper))
        assert detection.base is None
        assert "other shapes or blocks" in detection.evidence[0]

    def test_an_unknown_name_weighs_like_a_shape_that_does_not_fit(self) -> None:
        gate = {key for block in range(4) for key in lora(f"transformer.transformer_blocks.{block}.attn.gate", 8, 3072)}
        few = detect(adapter_of(FLUX | dict.fromkeys(sorted(gate)[:2], (8, 8))))
        assert few.base == "flux1-dev" and not few.proven
        many = {k: v for block in range(19) for k, v in lora(f"transformer.blocks.{block}.gate", 8, 3072).items()}
        assert detect(adapter_of(FLUX | many)).base is None

    @pytest.mark.parametrize(("base", "larger"), [
        ("wan2.1-t2v-1.3b", "wan2.1-vace-1.3b"), ("ssd-1b", "sdxl"), ("sd3-medium", "sd3.5-medium"),
    ])  # fmt: skip
    def test_a_base_with_further_modules_of_these_names_is_less_likely(self, base: str, larger: str) -> None:
        detection = detect(adapter_of(trained(base)))
        assert detection.base == base
        assert detection.fits_as_well(larger) and larger not in detection.rivals

    def test_kolors_and_sdxl_are_a_tie(self) -> None:
        detection = detect(adapter_of(trained("kolors")))
        assert {detection.base, *detection.rivals} == {"sdxl", "kolors"}
        assert detection.confidence == 0.7

    def test_the_first_blocks_of_a_longer_model_prove_nothing(self) -> None:
        """Nucleus-Image has 24 blocks with the attention of HunyuanVideo 1.5, which has 54."""
        detection = detect(adapter_of(trained("hunyuanvideo-1.5", blocks=24)))
        assert not detection.proven
        assert any("shorter model" in line for line in detection.evidence)
        scattered = trained("flux1-dev", ("attn.to_q", "norm.linear"))
        blocks = {key: shape for key, shape in scattered.items() if ".7." in key or ".20." in key}
        assert detect(adapter_of(blocks)).proven  # chosen blocks, as trainers offer them

    def test_known_names_with_unknown_shapes_are_told_from_unknown_names(self) -> None:
        wide = {key: tuple(7 if size == 3072 else size for size in shape) for key, shape in FLUX.items()}
        assert "shapes of no" in detect(adapter_of(wide)).evidence[0]
        assert detect(adapter_of(lora("transformer.stages.3.mixer", 8, 8))).evidence[0].startswith("no known base has")

    def test_another_width_is_no_base_at_all(self) -> None:
        strange = {key: tuple(7 if size == 3072 else size for size in shape) for key, shape in FLUX.items()}
        detection = detect(adapter_of(strange))
        assert detection.base is None
        assert detection.confidence == 0


class TestMetadata:
    @pytest.mark.parametrize(("field", "value"), [
        ("ss_base_model_version", "flux2_klein_4b"), ("modelspec.architecture", "Flux.2-klein-4b/lora"),
        ("base_model", "black-forest-labs/FLUX.2-klein-4B"), ("modelspec.architecture", "flux.2-klein-4b"),
        ("modelspec.architecture", "FLUX.2 [klein] 4B"), ("modelspec.architecture", "flux.2-klein/lora"),
        ("base_model", "flux-2-klein-base-4b"), ("ss_base_model_version", "flux2_klein_base_4b"),
    ])  # fmt: skip
    def test_metadata_chooses_among_equals(self, field: str, value: str) -> None:
        few = trained("flux2-klein-4b", ("attn.to_q", "attn.to_k"), blocks=2)
        detection = detect(adapter_of(few, {field: value}))
        assert detection.base == "flux2-klein-4b"
        assert detection.confidence == 0.9
        assert detection.warnings == ()

    @pytest.mark.parametrize(("field", "value", "base"), [
        ("ss_base_model_version", "sdxl_base_v1-0", "sdxl"),
        ("modelspec.architecture", "stable-diffusion-v1/lora", "sd1.5"),
        ("modelspec.architecture", "hunyuan-video/lora", "hunyuanvideo"),
        ("ss_network_module", "networks.lora_wan", "wan2.1-t2v-14b"),
        ("base_model_name_or_path", "Qwen/Qwen-Image", "qwen-image"),
        ("lora_adapter_metadata", '{"transformer.base_model_name_or_path": "Qwen/Qwen-Image"}', "qwen-image"),
    ])  # fmt: skip
    def test_metadata_against_the_tensors_is_reported(self, field: str, value: str, base: str) -> None:
        plain = detect(adapter_of(FLUX | lora("transformer.single_transformer_blocks.0.proj_mlp", 12288, 3072)))
        detection = detect(
            adapter_of(FLUX | lora("transformer.single_transformer_blocks.0.proj_mlp", 12288, 3072), {field: value})
        )
        if detection.base == base:  # all of it fits there too, and the metadata decided
            assert detection.confidence == 0.9
            return
        assert detection.base == plain.base == "flux1-dev"
        assert detection.confidence <= plain.confidence * 0.5
        assert any(base in warning and "metadata" in warning for warning in detection.warnings)

    def test_a_peft_configuration_names_its_base(self) -> None:
        config: dict[str, object] = {
            "peft_type": "LORA",
            "r": 4,
            "lora_alpha": 4,
            "base_model_name_or_path": "Qwen/Qwen-Image",
        }
        shapes = lora("base_model.model.transformer_blocks.18.ff.net.0.proj", 12288, 3072)
        detection = detect(adapter_of(shapes, config=config))
        assert any("qwen-image" in warning for warning in detection.warnings)

    @pytest.mark.parametrize("value", ["", "None", "unknown"])
    def test_empty_metadata_says_nothing(self, value: str) -> None:
        assert detect(adapter_of(FLUX, {"ss_base_model_version": value})).confidence == 0.8

    def test_an_architecture_nobody_knows_lowers_the_confidence(self) -> None:
        detection = detect(adapter_of(FLUX, {"modelspec.architecture": "glorious-diffusion-v9/lora"}))
        assert detection.base == "flux1-dev"
        assert detection.confidence < 0.6
        assert any("glorious-diffusion-v9" in warning for warning in detection.warnings)

    @pytest.mark.parametrize("value", ["my finetune", "stabilityai/whatever", "/home/me/models/flux.safetensors"])
    def test_any_model_may_be_called_anything(self, value: str) -> None:
        assert detect(adapter_of(FLUX, {"base_model": value, "ss_sd_model_name": value})).confidence >= 0.8

    def test_a_file_name_only_decides_between_equals(self) -> None:
        few = trained("flux2-klein-4b", ("attn.to_q", "attn.to_k"), blocks=2)
        assert detect(adapter_of(few, {"ss_sd_model_name": "flux1-dev.safetensors"})).base == "flux1-dev"
        sure = detect(adapter_of(trained("auraflow-0.3"), {"ss_sd_model_name": "flux1-dev.safetensors"}))
        assert (sure.base, sure.confidence, sure.warnings) == ("auraflow-0.3", 1, ())

    def test_check_reports_what_the_metadata_says_against_the_given_base(self) -> None:
        verdict = check(adapter_of(KLEIN, {"ss_base_model_version": "flux2_klein_4b"}), "flux1-dev", values="none")
        assert verdict.ok
        assert verdict.doubts
        assert any(
            "flux2-klein-4b" in warning and "ss_base_model_version" in warning for warning in verdict.report.warnings
        )
        base = verdict.as_dict()["base"]
        assert isinstance(base, dict)
        assert base["declared"] == [
            {"field": "ss_base_model_version", "value": "flux2_klein_4b", "bases": ["flux2-klein-4b"]}
        ]
        right = check(adapter_of(KLEIN, {"ss_base_model_version": "flux2_klein_4b"}), "flux2-klein-4b", values="none")
        assert right.ok
        assert right.doubts == []

    def test_hostile_metadata_costs_nothing(self) -> None:
        metadata = {
            "modelspec.architecture": "flux-" * 200_000,
            "ss_base_model_version": "(" * 100_000,
            "base_model": "\ud800",
        }
        with stopwatch(time.process_time) as cost:
            detection = detect(adapter_of(KLEIN, metadata))
        assert cost.seconds < 1
        assert all(len(warning) < 400 for warning in detection.warnings)


@pytest.mark.parametrize("base", [known.name for known in KNOWN[:: sized(5, 1)] if known.parts[0].component == "unet"])
def test_a_file_for_every_module_is_detected(base: str) -> None:
    """For any base, with all its matrices in diffusers names; only bases with the same ones may be named instead."""
    denoiser = known_index(base).denoiser
    assert denoiser is not None
    shapes: Shapes = {}
    for part, shape in denoiser.parts.items():
        if len(shape) == 2 and part.endswith(".weight") and part not in denoiser.missing:
            shapes |= lora(part.removesuffix(".weight"), *shape)
    adapter = adapter_of(shapes)
    with stopwatch(time.process_time) as cost:
        detection = detect(adapter)
    assert cost.seconds < 1.5
    assert detection.base == base or detection.fits_as_well(base)
    assert detection.confidence >= 0.5


def test_forms_know_what_the_whole_network_knows() -> None:
    """Indexing one block for many loses no name and no shape, in either naming of any base."""
    seen: set[KnownNetwork] = set()
    for known in KNOWN[:: sized(6, 1)]:
        for part in (part for part in known.parts if part not in seen and part.table != "unet"):
            seen.add(part)
            index, whole = form_index(part), known_index(known.name, "original").components[part.component]
            sides: tuple[tuple[Naming, Mapping[str, Spelling]], ...] = (
                ("diffusers", whole.by_diffusers),
                ("original", whole.by_original),
            )
            for naming, spellings in sides:
                for name, spelling in _ends(spellings).items():
                    for param, uses in spelling.items():
                        assert stacked_shape(whole, uses) in _shapes(index, name, naming, param), (known.name, name)


def _ends(spellings: Mapping[str, Spelling]) -> dict[str, Spelling]:
    """The first and the last module of each form."""
    first = {form_of(name): name for name in reversed(list(spellings))}
    last = {form_of(name): name for name in spellings}
    return {name: spellings[name] for name in (*first.values(), *last.values())}


def _shapes(index: FormIndex, name: str, naming: Naming, param: str) -> list[tuple[int, ...]]:
    _, modules = index.look_up(form_of(name), flat=False, namings=(naming,))
    return [
        stacked_shape(index.component, module.spelling[param])
        for module in modules
        if param in module.spelling and module.has(numbers_in(name))
    ]


def test_inner_ranges_are_spelled_out_and_the_outer_one_stays() -> None:
    names = {f"blocks.{i}.mlp.{j}.weight": (2, 2) for i in range(9) for j in (0, 2)} | {"head.0.weight": (2, 2)}
    condensed = expand_inner(pack(names))
    assert set(condensed) == {"blocks.[0-8].mlp.0.weight", "blocks.[0-8].mlp.2.weight", "head.0.weight"}
    assert expand(condensed) == names


def test_rows_of_tokens_fit_by_the_largest_of_them() -> None:
    """Groups of one key are compared with a base once."""
    rows = [TokenRows(value=hollow((1, 8)), indices=(index,)) for index in (3, 5000)]
    assert [each.fits((1000, 8)) for each in rows] == [True, False]
    assert len({each.fit_key() for each in rows}) == 2
