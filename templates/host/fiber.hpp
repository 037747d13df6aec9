// One fiber: a stack of its own and the place where it paused.
#pragma once

#include <csetjmp>
#include <memory>

#include <ucontext.h>

namespace hadagen::machine {

// `makecontext` begins a fiber, but `setjmp` and `longjmp` switch between them: `swapcontext` makes a system call each
// time and is twenty times slower. The two share nothing but the stack, on which they agree.
class Fiber {
   public:
    // The next `resume` calls `body`, which must not return.
    void begin(void (*body)()) { body_ = body; }

    [[noreturn]] void resume() {
        if (!body_) _longjmp(place, 1);
        if (!stack_) stack_.reset(new unsigned char[stack_bytes]);
        ucontext_t context;
        getcontext(&context);
        context.uc_stack.ss_sp = stack_.get();
        context.uc_stack.ss_size = stack_bytes;
        context.uc_link = nullptr;
        makecontext(&context, body_, 0);
        body_ = nullptr;
        setcontext(&context);
        __builtin_unreachable();
    }

    std::jmp_buf place;  // set by whoever pauses the fiber, from inside it

   private:
    static constexpr unsigned stack_bytes = 1u << 16;
    void (*body_)() = nullptr;
    std::unique_ptr<unsigned char[]> stack_;
};

}  // namespace hadagen::machine
