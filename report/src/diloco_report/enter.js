"use strict";
// The form of a token: keeps it for the page's actions, for this tab and this port alone, and takes one that the address brought.
(() => {
  const field = document.querySelector("input[name=token]");
  field.form.addEventListener("submit", () => sessionStorage.setItem("token", field.value.trim()));
  if (location.hash.length > 1) {
    field.value = location.hash.slice(1);
    history.replaceState(null, "", location.pathname);
    field.form.requestSubmit();
  }
})();
