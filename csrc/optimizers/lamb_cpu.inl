// LAMB on the CPU; compiled once per ISA.
#include "optimizers/lamb_math.inl"
#include "optimizers/step_cpu.inl"
