"""Prompts as they are written, and as each image gets them: styles are added, then random choices are made by its seed.

    GenerateConfig(prompt="a {red|green} apple", styles=["ink"], seed=7, count=2)
        ->  template = Template(prompt="a {red|green} apple", styles=("ink",)),
            image_prompts = ("a green apple, ink drawing", ...), one for each image

An image records both: its own prompt, which repeats it, and the template. A configuration with a template is resolved
already, so wildcard files may change between a request and its repetition.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterable

from inweave.errors import ConfigError, Problem
from inweave.generate.config import GenerateConfig, ImagePrompt, Template
from inweave.generate.styles import Styles, styled
from inweave.generate.wildcards import Wildcards, has_choices, resolved

PathLike = str | os.PathLike[str]


class PromptSources:
    """The wildcards and styles that prompts may name."""

    def __init__(self, wildcards: Iterable[PathLike] = (), styles: PathLike | None = None) -> None:
        self.wildcards = Wildcards([os.fspath(folder) for folder in wildcards])
        self.styles = Styles(None if styles is None else os.fspath(styles))

    def resolve(self, config: GenerateConfig) -> GenerateConfig:
        """Return a configuration with the prompt of every image; a random seed is drawn if a choice depends on it.

        Raises:
            ConfigError: a style or a wildcard is missing, or what a prompt resolves to is invalid.
        """
        if config.template is not None:
            return config
        wrong, texts = list[str | Problem](), [config.prompt, config.negative_prompt]
        try:
            chosen = self.styles.find(config.styles)
            texts = [styled(texts[0], [style.prompt for style in chosen])]
            texts += [styled(config.negative_prompt, [style.negative_prompt for style in chosen])]
        except ConfigError as error:
            wrong += error.problems
        random = any(map(has_choices, texts))
        if not random and not config.styles:
            return config
        seed = secrets.randbits(32) if random and config.seed in (None, -1) else config.seed
        prompts = list[ImagePrompt]()
        try:
            for number in range(config.count if random else 1):
                own = (seed or 0) + number
                prompt = resolved(texts[0], self.wildcards, own)
                negative = resolved(texts[1], self.wildcards, own, "negative_prompt")
                prompts.append(ImagePrompt(prompt=prompt, negative_prompt=negative))
        except ConfigError as error:
            wrong += error.problems
        if wrong:
            raise ConfigError(wrong)
        same = all(each == prompts[0] for each in prompts)
        return config.model_copy(
            update={
                "prompt": prompts[0].prompt, "negative_prompt": prompts[0].negative_prompt, "seed": seed, "styles": (),
                "template": Template(
                    prompt=config.prompt, negative_prompt=config.negative_prompt, styles=config.styles
                ),
                "image_prompts": () if same else tuple(prompts),
            }
        )  # fmt: skip


def configs_of(config: GenerateConfig) -> list[GenerateConfig]:
    """Return a resolved configuration as one for each prompt, in the order of the images."""
    if not config.image_prompts:
        return [config]
    assert config.seed is not None
    return [
        config.model_copy(update={**own.model_dump(), "seed": config.seed + number, "count": 1, "image_prompts": ()})
        for number, own in enumerate(config.image_prompts)
    ]
