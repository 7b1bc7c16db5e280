// Which instruction set's kernel attends to a shape.
#pragma once

#include <string>
#include <vector>

#include "kernel.h"

namespace wscope {

// All kernels of this build that the processor and the system let us run, simplest first. The first
// call asks the system for the use of AMX.
const std::vector<const Kernel*>& AvailableKernels();

// Why AMX is not among them although the processor has it; empty if it is, or has not.
std::string AmxRefusal();

// Makes `name` the path of every shape; empty = the best one for each. To be called before there
// are jobs. Throws std::invalid_argument for an unknown name, std::runtime_error if it is not
// available.
void ForceIsa(const std::string& name);

// The available kernel of that name; null if there is none.
const Kernel* FindKernel(const std::string& name);

// `isa`, or the kernel that takes the shapes that it does not support.
const Kernel& Resolve(const Kernel& isa, const HeadShape& shape);

// The kernel of a shape: the forced one; else the one that a timing of some milliseconds found
// best, made at the first call for this shape. Any thread.
const Kernel& KernelFor(const HeadShape& shape);

}  // namespace wscope
