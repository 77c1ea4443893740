"""All that is read of torch's private members, by subject; no other file of the package reads any.

Beside each stands what it is, why nothing public does it, and the versions of torch in which it was
seen. Tests look for each in the torch that is installed, so that a new one is told by name.
"""
