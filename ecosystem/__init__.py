"""Scripts in the idiom of other libraries, plain and with onefold: ``make ecosystem``."""
