// Exceptions of parallel regions and of functions that Python calls. One that left either would end the process.

#pragma once

#include <atomic>
#include <exception>
#include <new>
#include <type_traits>

extern "C" {

// Store the reason of an error of this thread for Python, and return the code.
int aft_report(int code, const char *reason) noexcept;
}

// Export NAME_size(), the size of a struct in C++, which Python compares with that of its own.
#define AFT_PACKED(function, type) \
  int function##_size() { return sizeof(type); }

namespace {

// The codes of failed functions, which `cpp.py` turns into Python exceptions.
constexpr int OUT_OF_MEMORY = -1000, FAILED = -1001;

// Run the body of a function that Python calls. Return what `f` returns, 0 if it returns nothing, or a code of failure.
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

// The first exception of a parallel region. It is rethrown after the region, because all threads must reach its loops.
class Region {
 public:
  // Call `f`, unless a thread has thrown.
  template <typename F>
  void run(F f) noexcept {
    if (failed_.load(std::memory_order_relaxed)) return;
    try {
      f();
    } catch (...) {
      if (!failed_.exchange(true)) error_ = std::current_exception();
    }
  }

  // Rethrow the exception. Call this after the region.
  void finish() const {
    if (error_) std::rethrow_exception(error_);
  }

 private:
  std::atomic<bool> failed_{false};
  std::exception_ptr error_;
};

}  // namespace
