"""Scripts around a training command: their variables, lists and conditions are read, and nothing is run."""

from __future__ import annotations

import pytest

from inweave.errors import ConfigError
from inweave.training.importers.detect import Imported, import_text

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
    assert any("2 training commands" in line for line in result.report())


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
