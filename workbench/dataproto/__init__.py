"""The batch: `DataProto`, a frozen value that shares its tensors and knows who wrote each column."""

from workbench.dataproto.core import DataProto, DataProtoItem
from workbench.dataproto.value import Origin

__all__ = ["DataProto", "DataProtoItem", "Origin"]
