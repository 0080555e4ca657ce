"""Every setting of a training run, by group: its type, its default and its description.

One flat table. The other facts of a setting are explained in `types`; contradictions are in `validation`, presets of
families in `presets`, reading and writing in `schema`.
"""

from __future__ import annotations

import typing
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, PlainValidator, ValidationInfo, field_validator, model_validator

from inweave.checked import CheckedModel
from inweave.training.config.normalization import is_cleared_by_none, normalize_setting
from inweave.training.config.types import (
    Fraction,
    FractionBelowOne,
    Network,
    NonNegativeFloat,
    NonNegativeInt,
    OutputDialect,
    PixelSide,
    PositiveFloat,
    PositiveInt,
    Rule,
    Seed,
    checked_resolution,
    setting,
)  # fmt: skip

_model = partial(setting, "Model")
_dataset = partial(setting, "Dataset and output")
_adapter = partial(setting, "Adapter")
_optimization = partial(setting, "Optimization")
_images = partial(setting, "Images", task="image")
_captions = partial(setting, "Captions", task="image")
_loss = partial(setting, "Loss", task="image")
_memory = partial(setting, "Memory and speed", resume="free")
_checkpoints = partial(setting, "Checkpoints", resume="free")
_sample = partial(setting, "Sample images", resume="free")
_validation = partial(setting, "Validation and logging")


class TrainSettings(CheckedModel):
    """The fields of `TrainConfig`, each checked on its own."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, protected_namespaces=())

    model: str = _model("inweave/emoji", "base model: a file, a folder, a known name or a Hub id", resume="content")
    variant: str | None = _model(None, "model variant, if the file does not say", task="image")
    parts: dict[str, str] = _model(
        {}, 'components to load from elsewhere, such as {vae = "vae.safetensors"}', task="image", resume="content"
    )
    device: str | None = _model(None, "cpu, cuda, cuda:1, mps, xpu; none: cuda or cpu", resume="free", private=True)
    assistant: str | None = _model(
        None,
        "adapter file that is merged into the base model while it is trained, such as the training adapter of a "
        "distilled model; the trained adapter does not contain it",
        task="image",
        resume="content",
        private=True,
    )
    precision: Literal["auto", "fp32", "bf16", "fp16"] = _model(
        "auto", "compute precision; trained weights keep fp32 master copies"
    )
    allow_download: bool = _model(False, "download the base model from the Hub if it is not here", resume="free")
    dataset: str | dict[str, Any] = _dataset(
        ...,
        "a folder of images, a kohya dataset .toml or its tables, a .txt or .jsonl of texts, or inweave/pixel",
        resume="content",
        min_length=1,
    )
    output: str = _dataset("out", "folder of adapters, checkpoints, logs and samples", resume="free", private=True)
    name: str = _dataset("lora", "file name of the adapter, without extension", resume="free", min_length=1)
    control: tuple[str, ...] = _dataset(
        (), "edit models: folders of reference images, matched by file name", task="image", resume="content"
    )
    trigger: str | None = _dataset(None, "trigger word, put before every caption that lacks it", task="image")
    max_length: Annotated[int, Field(ge=2)] = _dataset(1024, "tokens of an example, at most", task="text")

    network: Network = _adapter(
        "lora", "algorithm: lora, locon (LoRA on convolutions too), dora, loha, lokr, or one of another package"
    )
    rank: PositiveInt = _adapter(16, "dimension of the low-rank factors")
    alpha: PositiveFloat | None = _adapter(None, "the adapter is scaled by alpha / rank; none: alpha = rank")
    rslora: bool = _adapter(False, "rank-stabilized scaling (rs-LoRA): alpha / sqrt(rank)")
    conv_rank: PositiveInt | None = _adapter(None, "rank of convolutions; none: same as rank, where they are trained")
    conv_alpha: PositiveFloat | None = _adapter(None, "alpha of convolutions; none: their rank")
    tucker: bool = _adapter(False, "a Tucker core in convolutions wider than 1x1: LyCORIS' use_tucker")
    dropout: FractionBelowOne = _adapter(0.0, "dropout probability of the adapter's inputs")
    hidden_dropout: FractionBelowOne = _adapter(0.0, "dropout between LoRA's factors: kohya's network_dropout")
    rank_dropout: FractionBelowOne = _adapter(0.0, "dropout probability of LoRA's ranks, of LoHa's and LoKr's outputs")
    module_dropout: FractionBelowOne = _adapter(0.0, "probability of leaving out a module's adapter, per example")
    output_dropout: FractionBelowOne = _adapter(0.0, "probability of leaving out an output of a LoRA, per example")
    train_norm: bool = _adapter(
        False,
        "also train LayerNorm and GroupNorm: those that targets match, or of the blocks with a preset",
        task="image",
    )
    lokr_factor: Annotated[int, Field(ge=-1, lt=2**31)] = _adapter(
        -1, "LoKr: size of the small Kronecker factor; -1: the most even split"
    )
    lokr_decompose_both: bool = _adapter(False, "LoKr: the small factor is of low rank too, where that is smaller")
    targets: str | tuple[str, ...] = _adapter(
        "attention", "modules to adapt: attention, attention-mlp, all, or a list of names and regular expressions"
    )
    rules: tuple[Rule, ...] = _adapter((), "rank, alpha, learning rate or skip for the modules that match a pattern")
    train_denoiser: bool = _adapter(True, "train the UNet or transformer", task="image")
    train_text_encoders: bool = _adapter(False, "train the text encoders too")
    start_from: str | None = _adapter(
        None, "adapter file, in any dialect, to continue training from; the command takes names and hashes too"
    )
    scale_weight_norms: NonNegativeFloat = _adapter(
        0.0, "max-norm regularization: largest norm of a module's change, 1 is usual; 0 disables it"
    )

    steps: PositiveInt | None = _optimization(None, "optimizer steps; or set epochs")
    epochs: PositiveInt | None = _optimization(None, "passes over the dataset; or set steps")
    epoch_steps: Literal["exact", "whole"] = _optimization("exact", "whole: epochs end with a full step, as in kohya")
    batch_size: NonNegativeInt = _optimization(1, "examples per micro-batch; auto (0): as many as fit into the memory")
    drop_incomplete: bool = _optimization(
        False, "leave out the images of a bucket that do not fill a batch, others in each epoch", task="image"
    )
    gradient_accumulation: PositiveInt = _optimization(1, "micro-batches per optimizer step")
    learning_rate: PositiveFloat = _optimization(1e-4, "learning rate of the denoiser; 1 with prodigy and D-Adaptation")
    text_encoder_learning_rate: PositiveFloat | None = _optimization(
        None, "learning rate of the text encoders; none: same as learning_rate", task="image"
    )
    text_encoder_stop: NonNegativeFloat = _optimization(
        0, "steps after which text encoders stop training; below 1: as a fraction of all steps; 0: never", task="image"
    )
    loraplus_lr_ratio: PositiveFloat | None = _optimization(
        None, "LoRA+: learning rate of the up factors (B), as a multiple of that of the down factors; 16 is usual"
    )
    optimizer: Literal[
        "adamw", "adamw8bit", "prodigy", "schedulefree", "adafactor", "lion", "came", "dadapt_adam", "dadapt_adagrad",
        "dadapt_adan", "dadapt_lion", "dadapt_sgd", "torch.optim.Adadelta", "torch.optim.Adagrad", "torch.optim.Adam",
        "torch.optim.Adamax", "torch.optim.ASGD", "torch.optim.Muon", "torch.optim.NAdam", "torch.optim.RAdam",
        "torch.optim.RMSprop", "torch.optim.Rprop", "torch.optim.SGD",
    ] = _optimization(
        "adamw",
        "adamw, adamw8bit (8-bit state), schedulefree, adafactor, lion, came; prodigy and dadapt_adam (adapt their "
        "learning rate); or a class of torch.optim, such as RAdam",
    )  # fmt: skip
    optimizer_args: dict[str, Any] = _optimization({}, "further options of the optimizer")
    weight_decay: NonNegativeFloat = _optimization(0.01, "weight decay: decoupled, or as torch.optim's class has it")
    betas: tuple[FractionBelowOne, FractionBelowOne] = _optimization((0.9, 0.999), "Adam betas")
    epsilon: PositiveFloat = _optimization(1e-8, "Adam epsilon")
    lr_scheduler: Literal[
        "constant", "cosine", "linear", "polynomial", "rex", "torch.optim.lr_scheduler.ConstantLR",
        "torch.optim.lr_scheduler.CosineAnnealingLR", "torch.optim.lr_scheduler.CosineAnnealingWarmRestarts",
        "torch.optim.lr_scheduler.CyclicLR", "torch.optim.lr_scheduler.ExponentialLR",
        "torch.optim.lr_scheduler.LinearLR", "torch.optim.lr_scheduler.MultiStepLR",
        "torch.optim.lr_scheduler.OneCycleLR", "torch.optim.lr_scheduler.PolynomialLR",
        "torch.optim.lr_scheduler.StepLR",
    ] = _optimization(
        "constant",
        "learning rate after the warmup: constant, cosine, linear, polynomial, rex, or a class of "
        "torch.optim.lr_scheduler, such as CosineAnnealingLR",
    )  # fmt: skip
    lr_scheduler_args: dict[str, Any] = _optimization({}, "arguments of a class of torch.optim.lr_scheduler")
    lr_min_ratio: Fraction = _optimization(
        0.0, "cosine, linear, polynomial and rex: the learning rate at their end, as a fraction of the highest one"
    )
    warmup: NonNegativeFloat = _optimization(0, "learning rate warmup in steps; below 1: as a fraction of all steps")
    cosine_cycles: PositiveInt = _optimization(1, "cosine: number of cycles (hard restarts)")
    polynomial_power: PositiveFloat = _optimization(1.0, "polynomial: exponent")
    max_grad_norm: NonNegativeFloat = _optimization(1.0, "gradient clipping: maximum norm, 0 disables it")
    max_grad_value: NonNegativeFloat = _optimization(
        0.0, "gradient clipping by value: largest magnitude of each element, 0 disables it"
    )
    ema_decay: FractionBelowOne = _optimization(0.0, "decay of the moving average (EMA) of the weights; 0: none")
    seed: Seed = _optimization(0, "random seed: the same seed on the same machine trains the same adapter")

    resolution: Annotated[int | tuple[int, int] | None, PlainValidator(checked_resolution)] = _images(
        None, "training resolution in pixels, or [width, height]; none: the model's own"
    )
    buckets: bool = _images(True, "aspect ratio bucketing: keep the shape of images, batched by size")
    bucket_step: PixelSide = _images(64, "bucket sides are multiples of this")
    min_bucket: PixelSide = _images(256, "shortest bucket side")
    max_bucket: PixelSide | None = _images(None, "longest bucket side; none: twice the resolution")
    bucket_rule: Literal["inweave", "kohya", "musubi"] = _images("inweave", "the trainer whose rule chooses buckets")
    reference_resolution: PixelSide | None = _images(None, "side of a square with a reference's area; none: resolution")
    upscale: bool = _images(False, "enlarge images that are smaller than their bucket")
    flip: bool = _images(False, "flip images horizontally at random")
    crop: Literal["center", "random"] = _images("center", "how images are cropped to their bucket: center or random")

    caption_extensions: tuple[str, ...] = _captions((".txt", ".caption"), "extensions of caption files, the best first")
    caption: str | None = _captions(None, "one caption for all images that have none, which may be empty")
    caption_dropout: Fraction = _captions(0.0, "probability of an empty caption, which keeps guidance working")
    shuffle_tags: bool = _captions(False, "shuffle the tags of captions")
    keep_tokens: NonNegativeInt = _captions(0, "number of leading tags that stay in place")
    tag_separator: str = _captions(",", "separator between tags", min_length=1)
    tag_dropout: Fraction = _captions(0.0, "probability of dropping a tag")
    max_token_length: PositiveInt = _captions(
        225, "tokens of a caption that CLIP text encoders read, in chunks of 75; the end of longer ones is ignored"
    )
    wildcards: bool = _captions(True, "{a|b} and several captions are random choices; false: text, and the first one")
    caption_variants: PositiveInt = _captions(4, "number of shuffled variants cached per caption")

    objective: Literal["auto", "epsilon", "v_prediction", "flow"] = _loss("auto", "prediction; auto: the model's own")
    loss: Literal["mse", "l1", "huber", "smooth_l1"] = _loss(
        "mse", "mse, l1, huber (pseudo-Huber, robust against outliers) or smooth_l1"
    )
    huber_c: Annotated[float, Field(gt=0, le=1)] = _loss(0.1, "huber and smooth_l1: where the loss becomes linear")
    huber_schedule: Literal["constant", "exponential", "snr"] = _loss(
        "constant", "how huber_c depends on the timestep: constant, exponential or snr (not for flow models)"
    )
    min_snr_gamma: PositiveFloat | None = _loss(None, "min-SNR loss weighting; 5 is usual; not for flow models")
    sigma_weighting: NonNegativeFloat = _loss(
        0.0,
        "flow models: each image's loss counts noise level ** this; 2: clean images are compared instead of velocities",
    )
    timestep_weighting: Literal["none", "ai-toolkit"] = _loss(
        "none", 'flow models: weight of each image\'s loss by its timestep; ai-toolkit: the curve of its "weighted"'
    )
    noise_offset: NonNegativeFloat = _loss(0.0, "noise offset, for darker darks, brighter lights; not for flow models")
    noise_offset_random: bool = _loss(False, "noise_offset of each example: at random, from 0 to noise_offset")
    adaptive_noise_scale: float = _loss(0.0, "added to noise_offset, times the size of each channel's mean")
    input_perturbation: NonNegativeFloat = _loss(0.0, "noise of the input that the target lacks: ip_noise_gamma")
    input_perturbation_random: bool = _loss(False, "input_perturbation at random, from 0 to it, per example")
    multires_noise_iterations: NonNegativeInt = _loss(
        0, "multi-resolution (pyramid) noise: number of resolutions, 6 to 10 is usual; 0: off; not for flow models"
    )
    multires_noise_discount: Fraction = _loss(0.3, "multi-resolution noise: factor of each coarser resolution")
    debiased_estimation: bool = _loss(False, "debiased estimation loss weighting; not for flow models")
    min_timestep: NonNegativeInt | None = _loss(None, "first timestep to train, 0: almost clean; none: all")
    max_timestep: PositiveInt | None = _loss(
        None, "timesteps below this are trained, 1000 is pure noise; none: to the schedule's last"
    )
    timestep_sampling: Literal["auto", "uniform", "logit_normal", "sigmoid", "shift"] = _loss(
        "auto", "uniform, logit_normal, sigmoid, or shift: logit-normal, shifted by timestep_shift or by resolution"
    )
    timestep_shift: PositiveFloat | None = _loss(
        None, "flow models: shifts timesteps, however they are sampled, toward noise; 1: no shift"
    )
    logit_mean: float = _loss(0.0, "mean of logit-normal timesteps")
    logit_std: PositiveFloat = _loss(1.0, "standard deviation of logit-normal timesteps")
    masked_loss: bool = _loss(False, "compute the loss only where masks are white")
    mask_average: Literal["mask", "image"] = _loss("mask", "masked_loss: its mean is over mask, or image as in kohya")
    prior_loss_weight: NonNegativeFloat = _loss(1.0, "loss weight of regularization images")
    prior_prediction: bool = _loss(
        False, "train regularization images toward the base model's own prediction: OneTrainer's prior prediction"
    )
    guidance: NonNegativeFloat = _loss(1.0, "guidance value that FLUX.1 dev and FLUX.2 dev are conditioned on")
    clip_skip: Annotated[int, Field(ge=1, le=12)] | None = _loss(
        None, "CLIP layer to use, counted from the end; 2: the penultimate one"
    )

    gradient_checkpointing: Literal["off", "selective", "full"] = _memory(
        "off", "recompute activations in the backward pass instead of storing them: off, selective or full"
    )
    graph: Literal["off", "auto", "on"] = _memory(
        "auto", "record steps as CUDA graphs and replay them: off, on, or auto (if possible, and if the run is long)"
    )  # fmt: skip
    compile: Literal["off", "auto", "on"] = _memory(
        "auto",
        "compile the denoiser's blocks (regional torch.compile): off, on, or auto (if it is possible and saves time)",
    )
    deterministic: bool = _memory(
        False,
        "give the same bits in every run on the same GPU, and after resuming; slower, least so with "
        "inweave[deterministic]: the fastest attention kernels add gradients in any order, and attention with a mask "
        "takes more memory",
    )
    quantize: Literal["off", "auto", "keep", "fp8", "int8", "int8-hadamard", "nf4", "nf4-hadamard"] = _memory(
        "off",
        "store the denoiser's frozen weights in fewer bits: int8, int8-hadamard (rotated: closer where weights have "
        "outliers), nf4 (4 bits) or nf4-hadamard (4.5 bits, rotated) on any device; fp8 also multiplies in 8 bits, "
        "faster on a GPU that can, less exact; keep: a base whose file is quantized (fp8, int8, bitsandbytes, GGUF) "
        "stays so, off unpacks it; auto: the plan for vram chooses",
        task="image",
        resume="same",
    )
    qat: Literal["off", "fp8", "int8", "int8-hadamard", "nf4", "nf4-hadamard"] = _memory(
        "off", "quantization-aware training: for an adapter to be merged into a base in this format; slower",
        task="image", resume="same",
    )  # fmt: skip
    shard: bool = _memory(False, "shard the frozen base model over all GPUs (FSDP); needs --gpus 2 or more")
    cache_latents: bool = _memory(True, "encode images once and cache the latents", task="image")
    cache_text: bool = _memory(True, "encode captions once and cache the embeddings; off if text encoders are trained")
    cache_dir: str | None = _memory(None, "folder of the cache; none: ~/.cache/inweave/train", private=True)
    quantized_cache_gb: NonNegativeFloat = _memory(
        32.0, "disk space in the cache for quantized bases, so that the next run reads them; those used longest "
        "ago make room; 0: none",
        task="image",
    )  # fmt: skip
    vram: str | None = _memory(None, 'memory limit, such as "12GiB", or "auto" for the free memory')
    ram: str | None = _memory(None, 'host memory limit for runs planned within vram, such as "24GiB"; none: no limit')
    offload: Literal["off", "auto", "blocks"] = _memory(
        "auto", "keep frozen blocks in host memory and copy them while they are needed; the results are the same: off, "
        "blocks, or auto (only if the run would not fit into vram otherwise)",
    )  # fmt: skip
    offload_activations: Literal["off", "auto", "on"] = _memory(
        "auto", "keep inputs of checkpointed blocks in host memory between the passes; the results are the same: off, "
        "on, or auto (only if the run would not fit into vram otherwise)",
    )  # fmt: skip

    save_every: NonNegativeInt = _checkpoints(0, "steps between checkpoints; 0: only at the end")
    save_every_epochs: NonNegativeInt = _checkpoints(0, "epochs between checkpoints; 0: none")
    keep_last: NonNegativeInt = _checkpoints(
        3, "number of checkpoints and of their adapters to keep, 0: all; where it is not set, all adapters are kept"
    )
    keep_every: NonNegativeInt = _checkpoints(
        0, "milestones that keep_last does not remove: the first checkpoint of every N steps; 0: none"
    )
    save_dtype: Literal["fp16", "bf16", "fp32"] = _checkpoints("fp16", "data type of the adapter file")
    dialect: OutputDialect = _checkpoints(
        "kohya",
        "naming scheme of the adapter file: kohya, onetrainer (holds LoHa and LoKr of transformers), diffusers or peft",
    )
    resume: str = _checkpoints(
        "never",
        "auto or true: resume from the last checkpoint in output, if there is one; never; or the path of a checkpoint",
        private=True,
        min_length=1,
    )

    sample_every: NonNegativeInt = _sample(0, "steps between sample images; 0: none")
    sample_every_epochs: NonNegativeInt = _sample(0, "epochs between sample images; 0: none")
    sample_prompts: tuple[str, ...] = _sample((), "prompts to sample, with kohya's flags; or a .txt file", task="image")
    sample_seed: Seed = _sample(42, "seed of all sample images")
    sample_steps: PositiveInt | None = _sample(None, "sampler steps; none: the model's own", task="image")
    sample_guidance: NonNegativeFloat | None = _sample(None, "guidance scale; none: the model's own", task="image")

    validation_split: FractionBelowOne = _validation(0.0, "fraction of the dataset held out for validation")
    validate_every: NonNegativeInt = _validation(
        0, "steps between validations; 0: at every checkpoint, or once per epoch where there are none", resume="free"
    )
    validate_every_epochs: NonNegativeInt = _validation(0, "epochs between validations; 0: see above", resume="free")
    patience: NonNegativeInt = _validation(
        0, "early stopping: validations without improvement before the run stops; 0 disables it", resume="free"
    )
    max_skipped_steps: PositiveInt = _validation(
        20, "consecutive steps with a non-finite loss or gradient before the run stops", resume="free"
    )
    tensorboard: bool = _validation(False, "write TensorBoard logs into output: curves and samples", resume="free")
    wandb: bool = _validation(
        False,
        "log curves and sample images to Weights & Biases, with its own login; WANDB_MODE=offline keeps them here",
        resume="free",
    )
    wandb_project: str = _validation("inweave", "project at Weights & Biases", resume="free", min_length=1)
    wandb_run_name: str | None = _validation(None, "name of the run there; none: that of the adapter", resume="free")
    skip_unreadable: bool = _validation(False, "leave out images that cannot be read", task="image", resume="free")
    log_every: PositiveInt = _validation(10, "steps between lines of the log", resume="free")

    @field_validator("*", mode="before")
    @classmethod
    def _normalize(cls, value: Any, info: ValidationInfo) -> Any:
        name = info.field_name or ""
        return normalize_setting(name, value, cls.model_fields[name].annotation)

    @model_validator(mode="before")
    @classmethod
    def _do_not_cache_trained_encoders(cls, data: Any) -> Any:
        if isinstance(data, dict) and data.get("train_text_encoders") is True and "cache_text" not in data:
            return {**data, "cache_text": False}
        return data

    @property
    def samples(self) -> bool:
        """Whether sample images are generated."""
        return bool(self.sample_every or self.sample_every_epochs)

    @property
    def objective_kind(self) -> Literal["noise", "flow"] | None:
        """Prediction of the objective; None if the model's own is used."""
        return {"auto": None, "flow": "flow"}.get(self.objective, "noise")


#: account settings; never written to adapter metadata
ACCOUNT = frozenset({"wandb", "wandb_project", "wandb_run_name"})

#: every name of the setting `optimizer`
OPTIMIZERS: tuple[str, ...] = typing.get_args(TrainSettings.model_fields["optimizer"].annotation)

#: classes of torch among the values of `lr_scheduler`
TORCH_SCHEDULERS: tuple[str, ...] = tuple(
    name for name in typing.get_args(TrainSettings.model_fields["lr_scheduler"].annotation) if name.startswith("torch.")
)

#: fields that may be empty and hold no text, where "none" is unambiguous
CLEARED_BY_NONE = frozenset(
    name for name, field in TrainSettings.model_fields.items() if is_cleared_by_none(field.annotation)
)


def names_where(**facts: Any) -> frozenset[str]:
    """Return the settings with these facts: ``names_where(task="image")``."""
    return frozenset(name for name in TrainSettings.model_fields if facts.items() <= setting_facts(name).items())


def setting_facts(name: str) -> dict[str, Any]:
    """Return group, task, resume and private of a setting."""
    facts = TrainSettings.model_fields[name].json_schema_extra
    assert isinstance(facts, dict)
    return facts
