"""Texts beside PEFT, transformers and plain torch: folders that name their base, the recipe, and the loss per token."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import inweave
from inweave.training.distributed.world import World
from inweave.training.session import prepare, train
from tests.unit.training.tasks.test_language import configured, write_language_model

PAGE = Path(__file__).parents[2] / "docs" / "training.md"
PAIRS = [
    ("the cat", " sat"),
    ("a dog and a cat sat on the log and", " the mat and the dog and the log"),
    ("a", " mat on"),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_language_model("llama", tmp_path_factory.mktemp("llama"))


def recipe(name: str) -> str:
    match = re.search(rf"<!-- recipe: {name} -->\n```python\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
    assert match is not None
    return match[1]


def test_the_folder_of_a_run_names_its_base_and_loads_in_one_call(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = tmp_path / "pairs.jsonl"
    dataset.write_text("\n".join(json.dumps({"prompt": prompt, "completion": text}) for prompt, text in PAIRS))
    result = train(configured(model, dataset, tmp_path / "out", steps=3, name="lora"))
    config = json.loads((result.path / "adapter_config.json").read_text())
    assert (config["base_model_name_or_path"], config["task_type"]) == (str(model.resolve()), "CAUSAL_LM")
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(compile(recipe("loading"), str(PAGE), "exec"), names)
    loaded = names["model"]
    ids = torch.tensor([[0, 5, 9, 12]])
    with torch.no_grad():
        tuned, plain = loaded(ids).logits, loaded.get_base_model()
        with loaded.disable_adapter():
            assert (tuned - plain(ids).logits).abs().max() > 1e-3
    kohya_like = inweave.load(result.path)
    assert not any("base_model_name" in key for key in kohya_like.metadata), "a path is in the configuration alone"


def test_the_printed_recipe_with_a_trainer_runs(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from peft import AutoPeftModelForCausalLM

    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").symlink_to(model)
    names: dict[str, Any] = {}
    exec(compile(recipe("trainer"), str(PAGE), "exec"), names)
    losses = [entry["train_loss"] for entry in names["trainer"].state.log_history if "train_loss" in entry]
    assert losses and losses[0] < 5.0, "an untrained model of 300 tokens has a loss of 6"
    loaded: Any = AutoPeftModelForCausalLM.from_pretrained("cats")
    ids = torch.tensor([names["rows"][0]["input_ids"]])
    with torch.no_grad():
        mine, theirs = names["model"].eval()(ids).logits, loaded.eval()(ids).logits
    assert torch.allclose(mine, theirs, atol=1e-4 * float(mine.abs().max()))


@pytest.mark.parametrize(
    ("kind", "task"), [("SequenceClassification", "SEQ_CLS"), ("TokenClassification", "TOKEN_CLS")]
)
def test_folders_of_other_heads_name_their_task(kind: str, task: str, tmp_path: Path) -> None:
    import transformers
    from peft import AutoPeftModelForSequenceClassification, AutoPeftModelForTokenClassification

    torch.manual_seed(0)
    settings = transformers.BertConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, vocab_size=30
    )
    getattr(transformers, f"BertFor{kind}")(settings).save_pretrained(tmp_path / "base")
    network = getattr(transformers, f"BertFor{kind}").from_pretrained(tmp_path / "base")
    inweave.inject(network, rank=2)
    for parameter in network.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.3)
    inweave.save(inweave.collect(network), tmp_path / "out")
    config = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert (config["task_type"], config["base_model_name_or_path"]) == (task, str(tmp_path / "base"))
    opener = {"SEQ_CLS": AutoPeftModelForSequenceClassification, "TOKEN_CLS": AutoPeftModelForTokenClassification}[task]
    loaded: Any = opener.from_pretrained(str(tmp_path / "out"))
    ids = torch.arange(5)[None]
    with torch.no_grad():
        mine, theirs = network.eval()(ids).logits, loaded.eval()(ids).logits
    assert torch.allclose(mine, theirs, atol=1e-5)


@pytest.mark.parametrize(("batch_size", "accumulation"), [(3, 1), (1, 3), (2, 2)])
def test_an_update_is_that_of_the_mean_over_all_of_its_tokens(
    model: Path, batch_size: int, accumulation: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against plain torch: all completions' -log p, added and divided by their number, whatever the batches are.

    A mean of rows or of micro-batches is far off here: the completions have very different lengths.
    """
    dataset = tmp_path / "pairs.jsonl"
    dataset.write_text("\n".join(json.dumps({"prompt": prompt, "completion": text}) for prompt, text in PAIRS))
    settings = {"batch_size": batch_size, "gradient_accumulation": accumulation, "max_grad_norm": 0}
    run = prepare(configured(model, dataset, tmp_path / "out", **settings))[0]
    for values in run.trainable.parameters.values():
        torch.nn.init.normal_(values, std=0.1)
    examples = run.task.examples  # type: ignore[attr-defined]
    numbers = list(range(len(examples)))
    batches = [
        run.task.sample_batch(tuple(numbers[i : i + batch_size]), []) for i in range(0, len(numbers), batch_size)
    ]
    for split in (1, 2):
        run.step.split = split
        run.step._accumulate(0, batches)
        together = run.flat.grads.clone()
        losses, means = [], []
        run.model.zero_grad()
        for tokens, covered in examples:
            logits = run.model(torch.tensor([tokens])).logits[0, :-1].log_softmax(-1)
            targets = torch.tensor(tokens[1:])
            each = -logits.gather(1, targets[:, None])[:, 0][torch.tensor(covered[1:])]
            losses.append(each)
            means.append(float(each.detach().mean()))
        reference = torch.cat(losses).mean()
        parameters = list(run.trainable.parameters.values())
        gradients = torch.autograd.grad(reference, parameters)
        loss = float(reference.detach())
        assert float(run.step.loss) == pytest.approx(loss, rel=1e-5)
        assert abs(sum(means) / len(means) - loss) > 0.01 * loss, "the comparison can fail"
        actual = {name: run.flat.grads[place.place] for name, place in run.flat.segments.items()}
        for (name, gradient), expected in zip(actual.items(), gradients, strict=True):
            assert torch.allclose(gradient.flatten(), expected.flatten(), rtol=1e-3, atol=1e-6), name
    weights = [run.step.weight(batch) for batch in batches]
    validation = sum(weight * float(run.step.eval_loss(batch)) for weight, batch in zip(weights, batches, strict=True))
    assert validation / sum(weights) == pytest.approx(loss, rel=1e-5)
    monkeypatch.setattr(World, "add_up", lambda self, tensor: tensor.fill_(sum(weights)))
    of_all = torch.zeros_like(run.flat.grads)
    for rank, batch in enumerate(batches):  # one micro-batch in each process
        monkeypatch.setattr(run.step, "world", World(len(batches), rank))
        run.step._accumulate(0, [batch])
        of_all += run.flat.grads
    torch.testing.assert_close(of_all, together, rtol=1e-4, atol=1e-6)
