#include "parallel.hpp"

#include <atomic>
#include <cfenv>
#include <chrono>
#include <condition_variable>
#include <exception>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#if defined(__unix__) || defined(__APPLE__)
#include <pthread.h>
#endif

namespace sparsetopk {
namespace {

// Tells the processor that this thread waits, which leaves what they share to its sibling.
inline void spin_once() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// What the Watch of this thread is.
struct Looking {
  void (*look)(void*) = nullptr;
  void* context = nullptr;
  std::chrono::steady_clock::time_point last{};

  void now_and_then() {
    if (look == nullptr) return;
    const auto now = std::chrono::steady_clock::now();
    if (now - last < std::chrono::milliseconds(50)) return;
    last = now;
    look(context);
  }
};
thread_local Looking looking;

struct Job {
  std::size_t count;
  void (*run)(void*, std::size_t);
  void* context;
  std::atomic<std::size_t> next{0};
  std::atomic<bool> failed{false};
  std::exception_ptr error{};  // of the one that has set ``failed``
  std::fenv_t arithmetic{};    // of the thread that has the job: whether it flushes subnormal numbers

  // The first exception is kept for the thread that has the job, and nothing new is begun after it.
  void work() noexcept {
    try {
      for (std::size_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < count;) {
        looking.now_and_then();
        run(context, i);
      }
    } catch (...) {
      next.store(count, std::memory_order_relaxed);
      if (!failed.exchange(true)) error = std::current_exception();
    }
  }
};

// Looks whether ``ready`` holds for a short while: a thread that sleeps takes tens of microseconds to wake, as long as a
// row of 10,000 entries takes, and calls follow each other within that. Whoever else has work for the processor gets it.
template <class Ready>
bool await(const Ready& ready) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::microseconds(200);
  do {
    for (int i = 0; i < 64; ++i) {
      if (ready()) return true;
      spin_once();
    }
    std::this_thread::yield();
  } while (std::chrono::steady_clock::now() < end);
  return ready();
}

class Pool {
 public:
  // Whether the job was taken: not if another is being worked on.
  bool run(Job& job, std::size_t helpers) {
    std::unique_lock<std::mutex> one_job(busy_, std::try_to_lock);
    if (!one_job.owns_lock()) return false;
    while (threads_ < helpers) {
      try {
        std::thread([this, id = threads_] { sleep_and_work(id); }).detach();
      } catch (const std::exception&) {  // no more threads to be had, or no memory for one
        break;
      }
      ++threads_;
    }
    std::fegetenv(&job.arithmetic);
    {
      std::lock_guard<std::mutex> lock(mutex_);
      job_ = &job;
      wanted_ = helpers < threads_ ? helpers : threads_;
      ++generation_;
    }
    wake_.notify_all();
    job.work();
    std::unique_lock<std::mutex> lock(mutex_);
    job_ = nullptr;  // who has not started yet need not
    if (working_ != 0) {
      lock.unlock();
      await([this] { return working_ == 0; });
      lock.lock();
    }
    done_.wait(lock, [this] { return working_ == 0; });
    return true;
  }

 private:
  void sleep_and_work(std::size_t id) {
    std::size_t seen = 0;
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      if (generation_ == seen) {
        lock.unlock();
        await([&] { return generation_ != seen; });
        lock.lock();
      }
      wake_.wait(lock, [&] { return generation_ != seen; });
      seen = generation_;
      Job* job = job_;
      if (job == nullptr || id >= wanted_) continue;
      ++working_;
      lock.unlock();
      // A row must not depend on the thread that it falls to. XLA has its own threads flush, and no others.
      std::fesetenv(&job->arithmetic);
      job->work();
      lock.lock();
      if (--working_ == 0) done_.notify_one();
    }
  }

  std::mutex busy_, mutex_;
  std::condition_variable wake_, done_;
  std::size_t threads_ = 0, wanted_ = 0;
  std::atomic<std::size_t> working_{0}, generation_{0};  // changed with the lock alone, read also without
  Job* job_ = nullptr;
};

// Never destroyed: its threads may outlive static objects. In a forked child the parent's threads are
// gone, and its locks may be held for ever: the child takes a new pool and leaves the old one be. It is
// there before the first call, which a fork could interrupt.
Pool* pool = new Pool;
#if defined(__unix__) || defined(__APPLE__)
const int at_fork = pthread_atfork(nullptr, nullptr, [] { pool = new Pool; });
#endif

}  // namespace

Watch::Watch(void (*look)(void*), void* context) { looking = {look, context, std::chrono::steady_clock::now()}; }
Watch::~Watch() { looking = {}; }
void look_now_and_then() { looking.now_and_then(); }

void parallel_for(std::size_t count, std::size_t threads, void (*run)(void*, std::size_t), void* context) {
  Job job{count, run, context};
  if (threads > count) threads = count;
  if (threads <= 1 || !pool->run(job, threads - 1)) job.work();
  if (job.error) std::rethrow_exception(job.error);
}

}  // namespace sparsetopk
