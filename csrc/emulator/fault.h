// What stops a launch.
#pragma once

#include <string>

namespace tileops {
namespace emulator {

// Texts say "site 12"; tileops_dsl/emulate.py puts the line of the tile program there.
struct Fault {
  static constexpr int kOfRunningThread = -2, kOfBlock = -1;
  std::string kind;
  int site;
  std::string text;
  int thread = kOfRunningThread;
  int rank = 0;  // of the CTA in its cluster
};

inline std::string site_text(int site) { return "site " + std::to_string(site); }
inline std::string text_of(long long n) { return std::to_string(n); }

}  // namespace emulator
}  // namespace tileops
