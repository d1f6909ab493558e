"""DeepSpeed engines: their sharded state as boxes of flat tensors, saved and restored at any world size and stage."""
