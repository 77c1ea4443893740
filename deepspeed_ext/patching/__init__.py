"""Our ops inside models that exist: what replaces forwards of modules, and takes it out again.

- replaced: what stands in the place of a forward, in a module. recognition: what a module is, found
  out by its class and by what its forward computes. report: what was replaced, and what not.
- norms, feed_forward, experts, attention, loss: each knows one kind of modules.
- patching: patch and unpatch.
"""

from deepspeed_ext.patching.patching import patch, unpatch
from deepspeed_ext.patching.report import Report

__all__ = ["Report", "patch", "unpatch"]
