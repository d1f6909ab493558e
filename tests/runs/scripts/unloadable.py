"""Cannot be loaded: a package that it needs is not installed."""

import a_module_that_is_nowhere

a_module_that_is_nowhere.train()
