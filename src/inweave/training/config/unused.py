"""Settings without an effect, because another one turns off what they shape: they may differ after a resume."""

from __future__ import annotations

from inweave.training.config.fields import TrainSettings


def unused_settings(config: TrainSettings) -> frozenset[str]:
    """Return the names of settings that have no effect in a configuration."""
    c = config
    conditions: dict[tuple[str, ...], bool] = {
        ("text_encoder_learning_rate", "text_encoder_stop"): not c.train_text_encoders,
        ("cosine_cycles",): c.lr_scheduler != "cosine",
        ("polynomial_power",): c.lr_scheduler != "polynomial",
        ("input_perturbation_random",): c.input_perturbation == 0,
        ("lr_min_ratio",): c.lr_scheduler == "constant",
        ("lokr_factor",): c.network != "lokr",
        ("huber_c", "huber_schedule"): c.loss in ("mse", "l1"),
        ("multires_noise_discount",): c.multires_noise_iterations == 0,
        ("keep_tokens",): not c.shuffle_tags and c.tag_dropout == 0,
        ("logit_mean",): c.timestep_sampling in ("uniform", "sigmoid", "shift"),
        ("logit_std",): c.timestep_sampling == "uniform",
        ("betas", "epsilon"): c.optimizer == "adafactor",
    }
    return frozenset(name for names, unused in conditions.items() if unused for name in names)
