// A kernel that divides an integer by zero or leaves its stack shall end its launch, not the process.
#pragma once

#include <signal.h>

#include "fiber.h"

namespace tileops {
namespace emulator {

// While it lives, SIGFPE and SIGSEGV within a fiber abandon the fiber; elsewhere they do what they did before.
class Signals {
 public:
  Signals() {
    stack_t alternate = {};
    alternate.ss_sp = stack_;
    alternate.ss_size = sizeof(stack_);
    sigaltstack(&alternate, &old_stack_);
    struct sigaction action = {};
    action.sa_handler = handle;
    action.sa_flags = SA_ONSTACK | SA_NODEFER;
    for (int i = 0; i < 2; ++i) sigaction(kSignals[i], &action, &old_[i]);
  }
  ~Signals() {
    for (int i = 0; i < 2; ++i) sigaction(kSignals[i], &old_[i], nullptr);
    sigaltstack(&old_stack_, nullptr);
  }

  // Runs the fiber. Returns the signal that ended it, or 0.
  static int resume(Fiber& fiber) {
    caught() = 0;
    running() = &fiber;
    fiber.resume();
    running() = nullptr;
    return caught();
  }

 private:
  static constexpr int kSignals[] = {SIGFPE, SIGSEGV};
  static Fiber*& running() { static Fiber* f = nullptr; return f; }
  static int& caught() { static int signal = 0; return signal; }
  static void handle(int signal) {
    if (Fiber* f = running()) {
      caught() = signal;
      f->abandon();
    }
    ::signal(signal, SIG_DFL);  // and again, where it came from
  }

  struct sigaction old_[2];
  stack_t old_stack_ = {};
  char stack_[64 << 10];
};

}  // namespace emulator
}  // namespace tileops
