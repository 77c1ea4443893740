// SGD on the CPU; compiled once per ISA.
#include "optimizers/sgd_math.inl"
#include "optimizers/step_cpu.inl"
