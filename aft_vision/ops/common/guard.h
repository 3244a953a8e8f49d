// No exception leaves a parallel region, or a function that Python calls: either would end the process.

#pragma once

#include <atomic>
#include <exception>
#include <new>
#include <type_traits>

extern "C" {

// Keeps why a function of this thread has failed, for Python to ask for; returns the code.
int aft_report(int code, const char *reason) noexcept;
}

namespace {

// What a function returns that has failed. `build.py` makes Python's errors of them.
constexpr int OUT_OF_MEMORY = -1000, FAILED = -1001;

// A function that Python calls: what `f` returns, 0 if that is nothing, or how it has failed.
template <typename F>
int guarded(F f) noexcept {
  try {
    if constexpr (std::is_void_v<decltype(f())>)
      f();
    else
      return f();
    return 0;
  } catch (const std::bad_alloc &error) {
    return aft_report(OUT_OF_MEMORY, error.what());
  } catch (const std::exception &error) {
    return aft_report(FAILED, error.what());
  } catch (...) {
    return aft_report(FAILED, "unknown exception");
  }
}

// Keeps the first exception of a parallel region, all of whose threads must go on to its loops, until it has ended.
class Region {
 public:
  // f(), or nothing after an exception.
  template <typename F>
  void run(F f) noexcept {
    if (failed_.load(std::memory_order_relaxed)) return;
    try {
      f();
    } catch (...) {
      if (!failed_.exchange(true)) error_ = std::current_exception();
    }
  }

  // To be called after the region.
  void finish() const {
    if (error_) std::rethrow_exception(error_);
  }

 private:
  std::atomic<bool> failed_{false};
  std::exception_ptr error_;
};

}  // namespace
