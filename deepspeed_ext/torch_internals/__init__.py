"""All that is read of torch's private members, by subject; no other file of the package reads any.

Beside each stands what it is, and why nothing public does it. All were seen in torch 2.11.0 and
2.13.0; where one is of some versions only, that stands beside it, too. Tests look for each in the
torch that is installed, so that a new one is told by name. Other files may define what torch calls
by a private name, as a subclass of nn.Module does.
"""
