// Decoding of whole models for one instruction set, compiled like kernels.cpp.
#include "decode.h"
