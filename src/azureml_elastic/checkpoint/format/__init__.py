"""The files of a checkpoint: layout, manifest, retention. Independent of torch and of the run."""
