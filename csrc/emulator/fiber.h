// A function with a stack of its own, between which one OS thread switches.
#pragma once

#include <setjmp.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <new>

namespace tileops {
namespace emulator {

class Fiber {
 public:
  Fiber() {
    void* p = mmap(nullptr, kStack + kGuard, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED) throw std::bad_alloc();
    stack_ = static_cast<char*>(p);
    mprotect(stack_, kGuard, PROT_NONE);
  }
  ~Fiber() { munmap(stack_, kStack + kGuard); }
  Fiber(const Fiber&) = delete;
  Fiber& operator=(const Fiber&) = delete;

  // The next resume() enters `entry` afresh; whatever the stack held is dropped without destructors. `entry` never returns:
  // it ends in yield().
  void start(void (*entry)()) { entry_ = entry; fresh_ = true; }

  // From the scheduler: runs the fiber until its yield().
  __attribute__((noinline)) void resume() {
    if (_setjmp(scheduler_)) return;
    if (!fresh_) _longjmp(self_, 1);
    fresh_ = false;
    ucontext_t context;
    getcontext(&context);
    context.uc_stack.ss_sp = stack_ + kGuard;
    context.uc_stack.ss_size = kStack;
    context.uc_link = nullptr;
    makecontext(&context, entry_, 0);
    setcontext(&context);
  }

  // From a signal handler on the fiber's stack or on another: it is not to be resumed.
  [[noreturn]] void abandon() { _longjmp(scheduler_, 1); }

  // From inside the fiber.
  __attribute__((noinline)) void yield() {
    if (!_setjmp(self_)) _longjmp(scheduler_, 1);
  }

 private:
  // Enough for the fragments of a kernel, whose registers take two words each here, and for unwinding an exception.
  static constexpr size_t kStack = 256 << 10, kGuard = 4096;
  char* stack_;
  void (*entry_)() = nullptr;
  bool fresh_ = true;
  // _setjmp and not swapcontext after the start: swapcontext saves the signal mask, a system call (20 times slower).
  jmp_buf scheduler_, self_;
};

}  // namespace emulator
}  // namespace tileops
