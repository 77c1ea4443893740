// LARS on the CPU; compiled once per ISA.
#include "optimizers/lars_math.inl"
#include "optimizers/step_cpu.inl"
