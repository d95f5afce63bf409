"""Reads the DeepSpeed config and Bamboo's block in it; the only room that knows keys, defaults and files.

``source`` finds the config, ``block`` reads the ``bamboo`` block, ``supported`` refuses what we cannot do, ``batch``
works out the global batch, ``solo`` writes the config DeepSpeed itself is given. Nothing here needs torch or deepspeed
to be imported, so a bad config is reported in well under a second.
"""

from bamboo_ds.config.batch import BatchSizes, batch_sizes_of, resolve_batch_sizes
from bamboo_ds.config.block import BambooConfig, Fault, Redundancy, bamboo_block
from bamboo_ds.config.etcd import EtcdConfig
from bamboo_ds.config.keys import flat_settings
from bamboo_ds.config.solo import Precision, gradient_clipping, precision, solo_config
from bamboo_ds.config.source import early_config, load_deepspeed_config
from bamboo_ds.config.supported import check_supported

__all__ = [
    "BambooConfig",
    "BatchSizes",
    "EtcdConfig",
    "Fault",
    "Precision",
    "Redundancy",
    "bamboo_block",
    "batch_sizes_of",
    "check_supported",
    "early_config",
    "flat_settings",
    "gradient_clipping",
    "load_deepspeed_config",
    "precision",
    "resolve_batch_sizes",
    "solo_config",
]
