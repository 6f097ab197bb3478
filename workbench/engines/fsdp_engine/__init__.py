"""The same model sharded over processes with FSDP2."""
