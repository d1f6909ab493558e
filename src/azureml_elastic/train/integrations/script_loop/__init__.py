"""Training loops that a script writes itself around an object of its stack, such as an ``Accelerator`` or an engine."""
