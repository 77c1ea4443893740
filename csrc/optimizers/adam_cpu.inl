// Adam on the CPU; compiled once per ISA.
#include "optimizers/adam_math.inl"
#include "optimizers/step_cpu.inl"
