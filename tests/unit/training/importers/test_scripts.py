"""Scripts around a training command: their variables, lists and conditions are read, and nothing is run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from inweave.errors import ConfigError
from inweave.training.importers.detect import Imported, import_config, import_text

POWERSHELL = """
# settings
$model = "./models/base.ckpt" # the base
$unet_only = 0
$weights = ""
$eight_bit = 1
$module = "{module}"
$conv = 4
$offset = {offset}
$extra = [System.Collections.ArrayList]::new()

if ($unet_only) {{
  [void]$extra.Add("--network_train_unet_only")
}}
if ($weights) {{
  [void]$extra.Add("--network_weights=" + $weights)
}}
if ($eight_bit) {{ [void]$extra.Add("--use_8bit_adam") }}
if ($module -eq "lycoris.kohya") {{
  [void]$extra.Add("--network_args")
  [void]$extra.Add("conv_dim=$conv")
  [void]$extra.Add("algo=lora")
}} else {{
  [void]$extra.Add("--scale_weight_norms=1")
}}
if ($offset) {{
  [void]$extra.Add("--noise_offset=$offset")
}}
accelerate launch "./sd-scripts/train_network.py" `
  --pretrained_model_name_or_path=$model --train_data_dir="./train" --network_module=$module `
  --xformers --shuffle_caption $extra
Write-Output "done"
"""

BASH = """
#!/bin/bash
model="models/base.ckpt"   # the base
unet_only={unet_only}
optimizer="Lion"
reg=""
args=()
if [[ $unet_only == 1 ]]; then
  args+=("--network_train_unet_only")
elif [ -n "$reg" ]; then
  args+=("--reg_data_dir $reg")
else
  args+=("--text_encoder_lr 1e-5")
fi
if [[ $optimizer ]]; then args+=("--optimizer_type $optimizer"); fi
common="--network_dim 8 --network_alpha 4"
base=("accelerate" "launch"
    "--num_cpu_threads_per_process=2"
    "./train_network.py"
    "--train_data_dir=$HOME_OF_PICTURES")
command=("${{base[@]}}" "--pretrained_model_name_or_path=$model"
  "--network_module=networks.lora" $common)
"${{command[@]}}" --shuffle_caption ${{args[@]}}
"""


def powershell(module: str, offset: float) -> Imported:
    return import_text(POWERSHELL.format(module=module, offset=offset), "train.ps1")


def test_lists_and_conditions_of_powershell() -> None:
    c = powershell("networks.lora", 0).config
    assert (c.model, c.dataset, c.shuffle_tags, c.optimizer) == ("./models/base.ckpt", "./train", True, "adamw8bit")
    assert (c.network, c.noise_offset, c.train_text_encoders, c.start_from) == ("lora", 0, True, None)
    assert c.scale_weight_norms == 1
    c = powershell("lycoris.kohya", 0.1).config
    assert (c.network, c.conv_rank, c.noise_offset, c.scale_weight_norms) == ("locon", 4, 0.1, 0)


def test_lists_and_conditions_of_bash() -> None:
    result = import_text(BASH.format(unet_only=0), "train.sh")
    c = result.config
    assert (c.model, c.rank, c.alpha, c.optimizer, c.shuffle_tags) == ("models/base.ckpt", 8, 4, "lion", True)
    assert (c.train_text_encoders, c.text_encoder_learning_rate) == (True, 1e-5)
    assert [line for line in result.notes if "variable" in line] == [
        "train_data_dir: '$HOME_OF_PICTURES' has a variable that the file does not set; put its value in"
    ]
    assert not import_text(BASH.format(unet_only=1), "train.sh").config.train_text_encoders


def test_a_list_that_hangs_on_something_unreadable_is_refused() -> None:
    text = """
    extra=()
    if [ -f weights.safetensors ]; then
      extra+=("--network_weights=weights.safetensors")
    fi
    python train_network.py --network_module=networks.lora --train_data_dir=x "${extra[@]}"
    """
    with pytest.raises(ConfigError, match=r"extra: the options in this list depend on a condition .*-f weights"):
        import_text(text, "train.sh")
    assert import_text(text.replace('"${extra[@]}"', ""), "train.sh").config.rank == 4


def test_of_several_commands_the_first_of_the_longest_is_read_and_said() -> None:
    line = "accelerate launch train_network.py --network_module=networks.lora --train_data_dir={} --network_dim={}\n"
    result = import_text("mkdir --parents out\n" + line.format("a", 1) + line.format("b", 2), "train.sh")
    assert (result.config.dataset, result.config.rank) == ("a", 1)
    assert any("2 training commands" in note for note in result.notes)
    assert any("2 training commands" in line for line in result.report(verbose=True))


def test_one_value_of_diffusers_is_no_list() -> None:
    c = import_text(
        "accelerate launch train_dreambooth_lora_sdxl.py --instance_data_dir=x --instance_prompt=y "
        "--train_text_encoder "
        "--text_encoder_lr=1.0 --optimizer=prodigy --learning_rate=1.0",
        "train.sh",
    ).config
    assert (c.text_encoder_learning_rate, c.learning_rate) == (1.0, 1.0)


def test_calculations_of_shells() -> None:
    bash = (
        "EPOCHS=10\nSTEPS=$((EPOCHS * 100))\nWARM=$(( $STEPS / 30 ))\n"
        "python train_network.py --network_module=networks.lora --max_train_steps $STEPS --lr_scheduler cosine "
        "--lr_warmup_steps $WARM --seed $((STEPS + EPOCHS*2 - 1))"
    )
    c = import_text(bash, "a.sh", dataset="x").config
    assert (c.steps, c.warmup, c.seed) == (1000, 33, 1019)
    windows = (
        "SET STEPS=900\nset /A WARM=%STEPS%/10\n"
        "python train_network.py --network_module=networks.lora --lr_scheduler cosine --lr_warmup_steps %WARM%"
    )
    assert import_text(windows, "a.bat", dataset="x").config.warmup == 90
    with pytest.raises(ConfigError, match=r"lr_warmup_steps \(warmup\): should be a valid number"):
        import_text(windows.replace("/10", "/0"), "a.bat", dataset="x")


@pytest.mark.parametrize(
    "around",
    [
        "docker run --rm --gpus all -v \"$W/data\":/data image \\\n bash -c 'cd /x && {}'",
        'singularity exec --nv a.sif /bin/bash -lc "source env.sh; \\\n {}"',
        "cd /x && source venv/bin/activate && {} && echo done",
        "!{}",
    ],
)
def test_commands_inside_of_others(around: str) -> None:
    command = "accelerate launch sdxl_train_network.py --network_module networks.lora --network_dim 12 --seed 7"
    c = import_text(around.format(command), "a.sh", dataset="x").config
    assert (c.rank, c.seed) == (12, 7)


def test_options_on_lines_of_their_own_belong_to_the_command_before() -> None:
    """As kohya's documentation writes them, without a sign that the line goes on."""
    text = (
        "accelerate launch --num_cpu_threads_per_process 1 train_network.py\n"
        "    --pretrained_model_name_or_path=model.ckpt\r\n\n  --train_data_dir=x\n"
        "\t--network_module=networks.lora --network_dim 8   # a comment\n    --max_train_steps=7\necho done\n"
    )
    c = import_text(text, "train.sh").config
    assert (c.model, c.dataset, c.rank, c.steps) == ("model.ckpt", "x", 8, 7)


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "cp1252"])
def test_scripts_in_the_encodings_of_windows(encoding: str, tmp_path: Path) -> None:
    path = tmp_path / "train.ps1"
    text = POWERSHELL.format(module="networks.lora", offset=0).replace("# settings", "# café")
    path.write_bytes(text.encode(encoding))
    assert import_config(path).config == powershell("networks.lora", 0).config


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("python gen_img.py --ckpt m --network_module networks.lora --ckpt a", "script: 'gen_img'"),
        ("accelerate launch flux_kontext_train_network.py --dit m --network_module networks.lora_flux", "Kontext"),
        ("qwen_image_train_network.py --dit a/qwen_image_edit_2511.safetensors --network_dim 4", "an editing model"),
        ("accelerate launch wan_train_network.py --dit m --network_module networks.lora", "Wan"),
        ('pretrained_model_name_or_path = ""\ntrain_data_dir = ""\nnetwork_dim = 32', "this is a template"),
    ],
)  # fmt: skip
def test_what_trains_nothing_or_another_model_is_refused(text: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why) as caught:
        import_text(text, "theirs.txt", dataset="x")
    assert len(caught.value.problems) == 1


def test_a_step_of_buckets_that_kohya_alone_can_take_is_replaced_or_not_used() -> None:
    line = "accelerate launch train_network.py --network_module networks.lora --bucket_reso_steps 1 --resolution 500"
    with pytest.raises(ConfigError, match=r"bucket_reso_steps: 1: sides are multiples of 8 .*--set bucket_step=\.\.\."):
        import_text(f"{line} --enable_bucket", "a.sh", dataset="x")
    assert import_text(f"{line} --enable_bucket", "a.sh", dataset="x", bucket_step=16).config.bucket_step == 16
    assert import_text(line, "a.sh", dataset="x").config.buckets is False


def test_a_setting_left_out_takes_the_neutral_value() -> None:
    """--without is for every setting that is read."""
    line = "accelerate launch train_network.py --network_module networks.lora --enable_bucket --bucket_reso_steps 32"
    result = import_text(line, "a.sh", dataset="x", without=["bucket_reso_steps"])
    assert (result.config.bucket_step, result.no_equivalent) == (64, ["bucket_reso_steps: left out"])


FAMILIES = """
$mode = "{mode}"
$script = "train_network"
$optimizer = "AdamW8bit"
$save = 250
$list = [System.Collections.ArrayList]::new()
$launch = @(
  "--num_cpu_threads_per_process=8"
  "--mixed_precision=bf16"
)
If ($mode -ieq "sdxl" -or $mode -like "pony*")
{{
  $script = "sdxl_" + $script
}}
elseif ($mode -in @("flux", "flux-dev")) {{
  $script = "flux_" + $script; [void]$list.Add("--model_prediction_type=raw")
  if (($save -gt 100) -and -not $never_set) {{ [void]$list.Add("--save_every_n_steps=$save") }}
}}
# the models before
Else
{{
  [void]$list.Add("--clip_skip=2")
}}
if ($metadata) {{
  foreach ($each in $metadata) {{ [void]$list.Add("--metadata_$each") }}
}}
function Log($text) {{ Write-Output "--$text" }}
if ($optimizer -ieq "adamw8bit") {{ [void]$list.Add("--optimizer_type=$optimizer") }}
else {{ [void]$list.Add("--optimizer_type=Lion") }}
python -m accelerate.commands.launch $launch "./sd-scripts/$script.py" `
  --pretrained_model_name_or_path=m --train_data_dir=x --network_module=networks.lora{suffix} `
  $list
"""


@pytest.mark.parametrize(
    ("mode", "suffix", "family"),
    [("sd", "", "sd"), ("SDXL", "", "sdxl"), ("pony-v6", "", "sdxl"), ("flux-dev", "_flux", "flux")],
)
def test_blocks_of_powershell_in_every_layout(mode: str, suffix: str, family: str) -> None:
    """An elseif below its bracket belongs to the if before it, in any case, with any of the comparisons."""
    result = import_text(FAMILIES.format(mode=mode, suffix=suffix), "train.ps1")
    c = result.config
    assert (c.objective, c.guidance) == (("flow", 3.5) if family == "flux" else ("epsilon", 1.0))
    assert (c.clip_skip, c.save_every) == ({"sd": 2}.get(family), 250 if family == "flux" else 0)
    assert (c.optimizer, result.notes.count("clip_skip: is ignored for this model")) == ("adamw8bit", 0)
    sdxl = "down_blocks.2.attentions.0.proj_in"
    assert (family == "flux") != bool(re.fullmatch(c.targets[0], sdxl))


def test_what_a_loop_adds_is_not_guessed() -> None:
    text = FAMILIES.format(mode="sd", suffix="").replace("$save = 250", '$metadata = "author"')
    with pytest.raises(ConfigError, match=r"list: the options in this list depend on a condition .* 'foreach"):
        import_text(text, "train.ps1")
    changed = FAMILIES.format(mode="sd", suffix="").replace(
        "$save = 250", '$optimizer = $optimizer -replace "8bit", ""'
    )
    with pytest.raises(ConfigError, match=r"list: the options in this list depend on a condition"):
        import_text(changed, "train.ps1")
