"""Captions of images by a local image-to-text model of transformers: BLIP, GIT, Florence, Qwen-VL and others.

    Captioner("/models/blip")(image)                               -> "a red apple on a table"
    Captioner("/models/qwen-vl")(image, "Describe the image.")     models that follow an instruction

The model is a folder on this machine in the format of ``save_pretrained``, with safetensors. Nothing is downloaded, and
code in the folder is not run. A model with a chat template gets the instruction as a message of a user, any other one
as the beginning of the caption.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from inweave.errors import FormatError, MissingError, RequestError
from inweave.files.images import open_image

MAX_NEW_TOKENS = 100
#: for models with a chat template when nobody gives an instruction
INSTRUCTION = "Describe this image in one sentence for training an image generator."


def ensure_captioner(folder: Path) -> None:
    """Raise MissingError or FormatError unless a folder looks like a model of transformers."""
    if not folder.is_dir():
        raise MissingError(f"{folder}: not a folder; name a local image-to-text model in the format of save_pretrained")
    missing = [name for name in ("config.json", "preprocessor_config.json") if not (folder / name).is_file()]
    if (folder / "processor_config.json").is_file():
        missing = [name for name in missing if name != "preprocessor_config.json"]
    if missing:
        raise FormatError(f"{folder}: it has no {missing[0]}, so it is not an image-to-text model of transformers")
    if not any(folder.glob("*.safetensors")):
        raise FormatError(f"{folder}: it holds no .safetensors file; other formats of weights are not opened")


class Captioner:
    """A model in memory.

    Args:
        folder: of the model.
        device: on which it runs.
    """

    def __init__(self, folder: str | Path, device: str = "cpu") -> None:
        import torch
        from transformers import AutoModelForImageTextToText, AutoProcessor

        path = Path(folder)
        ensure_captioner(path)
        local = {"local_files_only": True, "trust_remote_code": False}
        # half precision is slow on a CPU, and most weights are stored in it
        dtype = torch.float32 if torch.device(device).type == "cpu" else "auto"
        processors: Any = AutoProcessor
        models: Any = AutoModelForImageTextToText
        try:
            self._processor = processors.from_pretrained(path, **local)
            model = models.from_pretrained(path, use_safetensors=True, dtype=dtype, **local)
        except (OSError, ValueError, ImportError, KeyError, RuntimeError) as error:
            reason = str(error).strip().split("\n")[0][:300]
            raise FormatError(f"{path}: transformers cannot load it as an image-to-text model: {reason}") from None
        self._model = model.to(device).eval()
        self._chat = bool(getattr(self._processor, "chat_template", None))

    def __call__(self, image: Any, instruction: str = "") -> str:
        """Return a caption of a Pillow image."""
        import torch

        text = instruction.strip()
        rgb = image.convert("RGB")
        if self._chat:
            content = [{"type": "image", "image": rgb}, {"type": "text", "text": text or INSTRUCTION}]
            inputs = self._processor.apply_chat_template(
                [{"role": "user", "content": content}], add_generation_prompt=True, tokenize=True, return_dict=True,
                return_tensors="pt",
            )  # fmt: skip
        else:
            inputs = self._processor(images=rgb, text=text or None, return_tensors="pt")
        inputs = inputs.to(self._model.device, self._model.dtype)
        with torch.inference_mode():
            tokens = self._model.generate(**inputs, max_new_tokens=MAX_NEW_TOKENS, do_sample=False)
        start = inputs["input_ids"].shape[1] if self._chat else 0  # a chat begins with the question
        caption = self._processor.batch_decode(tokens[:, start:], skip_special_tokens=True)[0]
        return " ".join(str(caption).split())


def caption_of(captioner: Captioner, path: Path, instruction: str = "") -> str:
    """Return a caption of an image file that was checked before; raise RequestError if the model fails on it."""
    with open_image(path, error=RequestError) as image:
        try:
            return captioner(image, instruction)
        except (ValueError, TypeError, RuntimeError, KeyError, IndexError) as error:
            reason = str(error).strip().split("\n")[0][:300]
            raise RequestError(f"the captioner failed on {path.name}: {reason}") from None
