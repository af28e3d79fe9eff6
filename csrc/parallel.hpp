// Threads for the kernels: a small pool that sleeps between calls.
#pragma once

#include <cstddef>

namespace sparsetopk {

// run(context, i) for i in [0, count), shared between the calling thread and at most threads - 1 others.
// A call that finds the pool busy, or comes from one of its threads, runs everything itself. An
// exception of run ends the job, and is thrown again where the job came from. After a fork the child starts with
// an empty pool.
void parallel_for(std::size_t count, std::size_t threads, void (*run)(void*, std::size_t), void* context);

// The same with f(i).
template <class F>
void parallel_for(std::size_t count, std::size_t threads, const F& f) {
  const auto run = [](void* context, std::size_t i) { (*static_cast<const F*>(context))(i); };
  parallel_for(count, threads, run, const_cast<F*>(&f));
}

// While it lives, jobs of this thread call look(context) from it, every twentieth of a second at most: it may throw, which ends
// the job as an exception of run does.
class Watch {
 public:
  Watch(void (*look)(void*), void* context);
  ~Watch();
  Watch(const Watch&) = delete;
  Watch& operator=(const Watch&) = delete;
};

// The same for a loop that is no job.
void look_now_and_then();

}  // namespace sparsetopk
