"""Decoder models. The architecture table stands in config.py; a new row there is served by the same decoder."""

from nybble.service.models.config import ARCHITECTURES, DecoderConfig, read_config
from nybble.service.models.decoder import Batch, Decoder
from nybble.service.models.load import load

__all__ = ["ARCHITECTURES", "Batch", "Decoder", "DecoderConfig", "load", "read_config"]
