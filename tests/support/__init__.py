"""What the tests share: import it as ``tests.support``."""
