// The namespace that the operators are registered in.
#pragma once

#ifndef TILEOPS_NAMESPACE
#define TILEOPS_NAMESPACE tileops
#endif
#define TILEOPS_STRING_(x) #x
#define TILEOPS_STRING(x) TILEOPS_STRING_(x)
#define TILEOPS_QUALIFIED(op) TILEOPS_STRING(TILEOPS_NAMESPACE) "::" op
