#include "host/calls/pending.hpp"

#include <exception>
#include <optional>
#include <utility>

#include "host/interrupt.hpp"

namespace deep_comm {

namespace {

class Pending final : public PendingDispatch {
 public:
  Pending(CallContext& context, const StreamOptions& streams, std::vector<Object> inputs)
      : context_(context),
        was_inference_mode_(context.memory.framework().is_inference_mode()),
        inputs_(std::move(inputs)),
        order_(std::make_unique<CallOrder>(context.order, streams)) {
    order_->prepare_pause();
  }

  void launch(const LaunchOfCall& launch) {
    launched_ = launch(*order_);
    order_->pause();
  }

  void settle() override {
    if (launched_ == nullptr) return;
    const std::unique_ptr<LaunchedCall> launched = std::move(launched_);
    if (context_.pending.get() == this) context_.pending.reset();
    try {
      Framework& framework = context_.memory.framework();
      std::shared_ptr<void> outside;
      context_.keep_step([&] {
        // In a call of the program's that is not this one's: gradients may want these tensors.
        if (!was_inference_mode_ && framework.is_inference_mode()) {
          outside = framework.leave_inference_mode();
        }
        order_->resume();
      });
      result_ = launched->receive();
      context_.end();
      release();
    } catch (const Interrupted&) {  // a signal's handler has ended the wait
      CallError interrupted;
      interrupted.error_class = CallError::Class::kCallInterrupted;
      interrupted.value = static_cast<int64_t>(context_.group.rank);
      fail_with(std::make_exception_ptr(interrupted));
      throw;
    } catch (const CallError& error) {
      const bool is_recorded = error.error_class == CallError::Class::kRecorded;
      fail_with(is_recorded && context_.recorded_error ? context_.recorded_error()
                                                       : std::current_exception());
    } catch (...) {
      fail_with(std::current_exception());
    }
  }

  void forget(const CallError& error) override {
    launched_.reset();
    fail_with(std::make_exception_ptr(error));
    if (context_.pending.get() == this) context_.pending.reset();
  }

  DispatchResult result() override {
    const std::shared_ptr<PendingCall> kept =
        context_.pending.get() == this ? context_.pending : nullptr;
    settle();
    if (error_ != nullptr) std::rethrow_exception(error_);
    return std::move(*result_);
  }

 private:
  void fail_with(std::exception_ptr error) {
    error_ = std::move(error);
    release();
  }
  void release() {
    order_.reset();
    inputs_.clear();
  }

  CallContext& context_;
  const bool was_inference_mode_;
  std::vector<Object> inputs_;
  std::unique_ptr<CallOrder> order_;
  std::unique_ptr<LaunchedCall> launched_;
  std::optional<DispatchResult> result_;
  std::exception_ptr error_;
};

}  // namespace

std::shared_ptr<PendingDispatch> launch_pending(CallContext& context, const StreamOptions& streams,
                                                std::vector<Object> inputs,
                                                const LaunchOfCall& launch) {
  auto pending = std::make_shared<Pending>(context, streams, std::move(inputs));
  pending->launch(launch);
  context.pending = pending;
  return pending;
}

}  // namespace deep_comm
