// A callable by reference, for as long as a call lasts: std::function copies what it
// is given, and for more than two captured references asks malloc for it (300
// instructions of the 1960 that a small request beneath the caches takes).
#pragma once

#include <memory>
#include <type_traits>
#include <utility>

namespace vmm {

template <typename Signature>
class FunctionRef;

template <typename Result, typename... Arguments>
class FunctionRef<Result(Arguments...)> {
 public:
  // `callable` outlives this object: a lambda written in the argument list does so
  // until the call returns.
  template <typename Callable, typename = std::enable_if_t<
                                   !std::is_same_v<std::remove_cv_t<std::remove_reference_t<Callable>>, FunctionRef>>>
  FunctionRef(Callable&& callable)  // NOLINT(google-explicit-constructor,bugprone-forwarding-reference-overload)
      : object_(const_cast<void*>(static_cast<const void*>(std::addressof(callable)))),
        call_([](void* object, Arguments... arguments) -> Result {
          return (*static_cast<std::remove_reference_t<Callable>*>(object))(std::forward<Arguments>(arguments)...);
        }) {}

  Result operator()(Arguments... arguments) const { return call_(object_, std::forward<Arguments>(arguments)...); }

 private:
  void* object_;
  Result (*call_)(void*, Arguments...);
};

}  // namespace vmm
