"""Support of the tests of one package."""
