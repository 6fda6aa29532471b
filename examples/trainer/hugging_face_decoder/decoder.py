"""A small decoder with the attributes of Hugging Face's, as a pipeline; nothing is downloaded.

Decoders of transformers need no code: ``model.name: ballast_trainer.models.hugging_face:from_config`` or
``:pretrained``.  Blocks that come so can be changed by every dynamic case.
"""

from typing import Any

from ballast_trainer.models.hugging_face import decoder
from ballast_trainer.models.protocol import Model
from small_decoder import SmallForCausalLM


def small(**sizes: Any) -> Model:
    """The decoder of this folder."""
    return decoder(SmallForCausalLM(**sizes))
